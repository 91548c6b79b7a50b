"""Triton's short convolution against the formula; see `test_short_conv`."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from engine.model_runner.kernels.triton.state_conv import short_conv
from engine.model_runner.states.state_runs import StateRuns, StateSave
from tests.selection import examples
from tests.triton_interpreter import repair_interpreter

from .test_short_conv import SHAPES, SOME, Step, check

repair_interpreter()

pytestmark = pytest.mark.usefixtures("poisoned")


@settings(SOME, max_examples=examples(9))
@given(**SHAPES)
def test_any_step(device, step, size, taps, bias, dtype):
    check(short_conv, step, size=size, taps=taps, bias=bias, dtype=dtype, device=device)


def test_runs_that_are_known_on_the_device_only(device):
    """As in a recording: the grid has programs for more runs than there are."""
    step = Step([1, 3, 0], [4, 0, 9], [1, 1, 1], {}, [StateSave(1, 5, 7), StateSave(0, 10, 6)])

    def recorded(
        bcx: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        slots: torch.Tensor,
        runs: StateRuns,
    ) -> torch.Tensor:
        plan = torch.zeros(1 + 8 * 3, dtype=torch.int64, device=device)
        plan[: len(runs.plan)] = runs.plan
        return short_conv(bcx, weight, bias, slots, StateRuns(plan))

    check(recorded, step, size=48, taps=3, bias=False, dtype=torch.bfloat16, device=device)
