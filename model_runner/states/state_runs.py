"""`StateRuns`: from which state slot each piece of a step's tokens starts, and where its state goes.

A state slot holds what the state layers keep of a request: the state after its last computed token. Slots of a pool for
R rows, the scheduler's C checkpoints and K drafts of a row:

    0                   the state before the first token: zeros; never written
    1..R                of the rows
    R + 1               of padding
    R + 2..R + 1 + C    checkpoints 1..C
    ...                 of each row, after the token before its drafts, after the first draft, and so on: K

The tokens of a request are one run, or several, if the state within them is kept, too: one run for each checkpoint. A
run starts from the state of its `load` slot and writes the state after its last token to its `store` slot. Runs are
computed in order, so a run may load what an earlier one has stored.
"""

# Shapes: B requests, T new tokens in the batch, n runs, S slots, L taps of the convolution, K channels on this rank;
# [H, ...] of a state: see `RecurrentState`.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int64s = npt.NDArray[np.int64]

ZERO_SLOT: Final = 0
_WORDS: Final = 4  # of a run


class StateRun(NamedTuple):
    """The tokens `first`..`last`-1 of one request; none: the state of `load` is copied to `store`."""

    load: int
    first: int
    last: int
    store: int


class StateSave(NamedTuple):
    """Keep the state of a request after its first `position` tokens in another slot than its own."""

    row: int
    position: int
    slot: int


class StateLayout(NamedTuple):
    """The slots of a pool: R rows, C checkpoints, K drafts of a row."""

    num_rows: int
    num_checkpoints: int = 0
    max_drafts: int = 0

    @property
    def num_slots(self) -> int:
        """All slots."""
        return self._first_of_drafts + self.num_rows * self.max_drafts

    @property
    def _first_of_drafts(self) -> int:
        return self.num_rows + 2 + self.num_checkpoints

    def of_checkpoint(self, checkpoint: int) -> int:
        """The slot of a checkpoint, 1..C."""
        return self.num_rows + 1 + checkpoint

    def of_draft(self, row: int, accepted: int) -> int:
        """The slot of a row's state after 0..K-1 accepted drafts."""
        return self._first_of_drafts + row * self.max_drafts + accepted


@dataclass(frozen=True, slots=True)
class StateRuns:
    """The runs of a step.

    Attributes:
        plan: [1 + 4 * n] int64, on the device: the number of runs, then load, first, last and store of each.
        runs: on the host; empty in a recording, which reads only `plan`.
    """

    plan: Tensor
    runs: tuple[StateRun, ...] = ()

    @classmethod
    def of(cls, plan: Int64s, on_device: Tensor) -> StateRuns:
        """The runs of a plan, which was uploaded."""
        return cls(on_device, runs_in(plan))

    def on_host(self) -> tuple[StateRun, ...]:
        """The runs; for a recording on the CPU those that its plan holds now."""
        return self.runs or runs_in(self.plan.numpy())


def runs_in(plan: Int64s) -> tuple[StateRun, ...]:
    """The runs of a plan on the host."""
    num_runs = int(plan[0])
    numbers = plan[1 : 1 + _WORDS * num_runs].reshape(-1, _WORDS).tolist()
    return tuple([StateRun(*run) for run in numbers])


def plan_states(
    rows: Int64s,
    prefix_lens: Int64s,
    extend_lens: Int64s,
    *,
    loads: Mapping[int, int],
    saves: Sequence[StateSave],
) -> Int64s:
    """The plan of a step: [1 + 4 * n].

    Args:
        rows, prefix_lens, extend_lens: [B], see `BatchLayout`.
        loads: row -> slot from which it starts in this step, if that is not its own.
        saves: those of the step; a save of another row or outside of a request's new tokens is not of this step.
    """
    lasts = np.cumsum(extend_lens)
    firsts = lasts - extend_lens
    own = rows + 1
    load = np.where(prefix_lens > 0, own, ZERO_SLOT)
    if loads:
        load = _with_loads(load, rows, loads)
    if saves:
        kept = _saves_by_request(rows, prefix_lens, extend_lens, saves)
        if kept:
            return _with_saves(load, firsts, lasts, own, prefix_lens, kept)
    plan = np.empty(1 + _WORDS * len(rows), dtype=np.int64)
    plan[0] = len(rows)
    plan[1::4], plan[2::4], plan[3::4], plan[4::4] = load, firsts, lasts, own
    return plan


def write_padded_plan(memory: Int64s, plan: Int64s, num_tokens: int, size: int, num_rows: int) -> None:
    """Write the plan of `num_tokens` decodes to the memory of a recording of `size`; padding has a slot of its own."""
    num_words = 1 + _WORDS * int(plan[0])
    memory[:num_words] = plan[:num_words]
    padding = np.arange(num_tokens, size)
    memory[0] += len(padding)
    runs = memory[num_words : num_words + _WORDS * len(padding)].reshape(-1, _WORDS)
    runs[:, 0], runs[:, 1], runs[:, 2], runs[:, 3] = ZERO_SLOT, padding, padding + 1, num_rows + 1


def recorded_state_plan(num_tokens: int) -> Tensor:
    """Memory of a recording for the plan of so many tokens: with checkpoints there are at most two runs a token."""
    return torch.zeros(1 + 2 * _WORDS * num_tokens, dtype=torch.int64)


def _with_loads(load: Int64s, rows: Int64s, loads: Mapping[int, int]) -> Int64s:
    load = load.copy()
    for idx, row in enumerate(rows.tolist()):
        if row in loads:
            load[idx] = loads[row]
    return load


def _saves_by_request(
    rows: Int64s, prefix_lens: Int64s, extend_lens: Int64s, saves: Sequence[StateSave]
) -> dict[int, list[StateSave]]:
    """Batch index -> the saves of the request in this step, in the order of positions."""
    index_of = {row: idx for idx, row in enumerate(rows.tolist())}
    kept: dict[int, list[StateSave]] = {}
    for save in saves:
        idx = index_of.get(save.row)
        if idx is not None and 0 < save.position - int(prefix_lens[idx]) <= int(extend_lens[idx]):
            kept.setdefault(idx, []).append(save)
    for of_request in kept.values():
        of_request.sort(key=lambda save: save.position)
    return kept


def _with_saves(
    load: Int64s,
    firsts: Int64s,
    lasts: Int64s,
    own: Int64s,
    prefix_lens: Int64s,
    kept: Mapping[int, Sequence[StateSave]],
) -> Int64s:
    runs: list[int] = []
    columns = (column.tolist() for column in (load, firsts, lasts, own, prefix_lens))
    for idx, (from_slot, first, last, store, start) in enumerate(zip(*columns, strict=True)):
        at, slot = first, from_slot
        for save in kept.get(idx, ()):
            middle = first + save.position - start
            runs += (slot, at, middle, save.slot)
            at, slot = middle, save.slot
        runs += (slot, at, last, store)
    return np.array([len(runs) // _WORDS, *runs], dtype=np.int64)


class LayerStates(NamedTuple):
    """The slots of one state layer; see `state_runs` for their numbering.

    Attributes:
        conv: [S, L - 1, K] in the dtype of the model: the last inputs of its convolution, the oldest first.
        recurrent: [S, H, ...] in a dtype of its own; None: the layer keeps nothing beside them.
    """

    conv: Tensor
    recurrent: Tensor | None = None
