"""Triton's gated delta net against the formula; see `test_delta_net`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from engine.model_runner.kernels.triton.delta_net import gated_delta
from engine.model_runner.states.state_runs import StateRuns, StateSave
from tests.triton_interpreter import repair_interpreter

from .test_delta_net import HEADS, check
from .test_short_conv import LAYOUT, Step

if TYPE_CHECKING:
    from engine.model_runner.states.state_runs import LayerStates
    from engine.model_runner.states.state_weights import DeltaWeights

repair_interpreter()

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("heads", "taps", "dtype"), [("2/4 of 16, 32", 4, torch.bfloat16), ("1/3 of 20, 7", 3, torch.float32)]
)
def test_prompts_beside_decodes(device, heads, taps, dtype):
    saves = [StateSave(2, 7, LAYOUT.of_checkpoint(2)), StateSave(0, 5, LAYOUT.of_checkpoint(3))]
    step = Step([2, 3, 0, 1], [5, 9, 0, 1], [4, 1, 5, 1], {1: LAYOUT.of_checkpoint(1)}, saves)
    check(gated_delta, step, heads=HEADS[heads], taps=taps, dtype=dtype, device=device)


def test_runs_that_are_known_on_the_device_only(device):
    """As in a recording: the grid has programs for more runs than there are."""
    step = Step([1, 3, 0], [4, 0, 9], [1, 1, 1], {}, [StateSave(1, 5, 7), StateSave(0, 10, 6)])

    def recorded(
        qkvz: torch.Tensor, ba: torch.Tensor, weights: DeltaWeights, states: LayerStates, runs: StateRuns
    ) -> torch.Tensor:
        plan = torch.zeros(1 + 8 * 3, dtype=torch.int64, device=device)
        plan[: len(runs.plan)] = runs.plan
        return gated_delta(qkvz, ba, weights, states, StateRuns(plan))

    check(recorded, step, heads=HEADS["1/3 of 20, 7"], taps=4, dtype=torch.bfloat16, device=device)
