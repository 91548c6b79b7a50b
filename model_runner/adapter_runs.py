"""`AdapterBatch`: which tokens of a step use which adapter slot, as runs of equal slots."""

# Shapes: T new tokens in the batch, W of them need logits, R rows of logits.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from torch import Tensor

Int64s = npt.NDArray[np.int64]
Put = Callable[[Int64s], "Tensor"]
"""Uploads an array: see `InputBuffers`."""

MAX_RUN_TOKENS: Final = 32
"""Longer runs are cut: a run is the unit of work of a kernel."""


class Run(NamedTuple):
    """The tokens `first`..`last`-1, which use one slot; slot 0 is the base model."""

    slot: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class AdapterRuns:
    """The runs of some rows, in order, without gaps.

    Attributes:
        runs: on the host; empty in a recording, which reads only `plan`.
        plan: [1 + 3 * n] int64, on the device: the number of runs, then slot, first and last of each.
    """

    runs: tuple[Run, ...]
    plan: Tensor

    @classmethod
    def recorded(cls, plan: Tensor) -> AdapterRuns:
        """Runs whose plan is written anew before each replay, with `write_plan`."""
        return cls((), plan)

    def on_host(self) -> tuple[Run, ...]:
        """The runs; for a recording on the CPU those that its plan holds now."""
        if self.runs:
            return self.runs
        num_runs, *numbers = self.plan.tolist()
        return tuple(Run(*numbers[3 * n : 3 * n + 3]) for n in range(num_runs))


@dataclass(frozen=True, slots=True)
class AdapterBatch:
    """The runs of a step in which at least one token uses an adapter.

    Attributes:
        tokens: of all T tokens.
        kept: of the W that are computed further after the last layer's attention.
        sampled: of the R rows of logits.
    """

    tokens: AdapterRuns
    kept: AdapterRuns
    sampled: AdapterRuns


def plan_of(slots: Int64s) -> Int64s:
    """The plan for the slots of some rows, [n] -> [1 + 3 * runs]."""
    num = len(slots)
    if not num:  # the rows of logits of a step in which nothing is sampled
        return np.zeros(1, dtype=np.int64)
    begins = np.flatnonzero(np.concatenate(([True], slots[1:] != slots[:-1])))
    lengths = np.diff(np.append(begins, num))
    if num and lengths.max() > MAX_RUN_TOKENS:
        pieces = -(-lengths // MAX_RUN_TOKENS)
        index = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        begins = np.repeat(begins, pieces) + index * MAX_RUN_TOKENS
    plan = np.empty(1 + 3 * len(begins), dtype=np.int64)
    plan[0] = len(begins)
    runs = plan[1:].reshape(-1, 3)
    runs[:, 0], runs[:, 1] = slots[begins], begins
    runs[:-1, 2], runs[-1:, 2] = begins[1:], num
    return plan


def most_runs(num_tokens: int, num_rows: int) -> int:
    """The most runs of a step with tokens of so many pool rows; those of a row are consecutive."""
    return min(num_tokens, num_rows + num_tokens // MAX_RUN_TOKENS)


def write_plan(plan: Int64s, slots: Int64s) -> None:
    """Write the plan for [n] slots to the memory of a recording, which has room for `most_runs`."""
    made = plan_of(slots)
    plan[: len(made)] = made


def runs_of(slots: Int64s, put: Put) -> AdapterRuns:
    """The runs for the slots of some rows, uploaded."""
    plan = plan_of(slots)
    return AdapterRuns(tuple(Run(*run) for run in plan[1:].reshape(-1, 3).tolist()), put(plan))


def batch_of(slots: Int64s, kept: Int64s | None, sampled: Int64s | None, put: Put) -> AdapterBatch:
    """The runs of a step.

    Args:
        slots: [T].
        kept: [W] indices of tokens; None: all.
        sampled: [R] indices among the W; None: all.
    """
    tokens = runs_of(slots, put)
    kept_runs, kept_slots = tokens, slots
    if kept is not None:
        kept_slots = slots[kept]
        kept_runs = runs_of(kept_slots, put)
    sampled_runs = kept_runs if sampled is None else runs_of(kept_slots[sampled], put)
    return AdapterBatch(tokens, kept_runs, sampled_runs)


def runs_or_none(slots: Int64s, put: Put) -> AdapterRuns | None:
    """The runs for the slots of some rows; None if all use the base model."""
    return runs_of(slots, put) if slots.any() else None


def recorded_plan(num_tokens: int) -> Tensor:
    """Memory of a recording for the plan of so many tokens, each of which may be a run."""
    return torch.zeros(1 + 3 * num_tokens, dtype=torch.int64)
