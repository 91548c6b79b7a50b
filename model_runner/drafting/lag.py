"""`Lag`: the tokens that the model has computed and a drafter has not yet.

A drafter computes every token of the model once more, because pages with its keys and values are shared like the
model's. It need not do so in the same step: several tokens at once cost less than one after the other, and the first
draft of a step is what follows the last of them. So the tokens of decodes wait until the request is drafted for, leaves
its row (then its pages may be shared), or has `MOST` of them and others come:

    computed by the drafter | wait        | the step's last token, drafts
    0 ................ done | done .. end | position

Prompts do not wait, not even one token: their pages are shared at once, or replaced by shared ones. The pages of a
running request with its decodes are shared only with a checkpoint of state layers; the runner calls `Drafter.share`
then.
"""

# Shapes: n requests, T tokens of them.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from ..attention.backend import BatchLayout

if TYPE_CHECKING:
    from torch import Tensor

    from ..input_batch import InputBatch

Int64s = npt.NDArray[np.int64]
Put = Callable[[npt.NDArray[Any]], "Tensor"]

_ONE: Final = 1
MOST: Final = 16
"""Tokens of a row that wait when others come, at most, so that their states take little memory."""


class Tokens(NamedTuple):
    """T tokens of decodes: host arrays; ids, [T] int64, and features, [T, F], on the device.

    Attributes:
        token_rows, positions, out_cache_loc: [T]; of a row the positions ascend without a gap.
    """

    token_rows: Int64s
    positions: Int64s
    out_cache_loc: Int64s
    input_ids: Tensor
    states: Tensor

    @classmethod
    def of_steps(cls, steps: Sequence[Self]) -> Self:
        """The tokens of one or more steps, in their order."""
        if len(steps) == 1:
            return steps[0]
        rows, positions, loc, ids, states = zip(*steps, strict=True)
        hosts = np.concatenate(rows), np.concatenate(positions), np.concatenate(loc)
        return cls(*hosts, torch.cat(ids), torch.cat(states))


class Run(NamedTuple):
    """Consecutive tokens of n requests; host arrays but for the ids. Requests with several tokens come first.

    Attributes:
        idx: [n] index of each request in what was asked for.
        rows, prefix_lens, extend_lens: [n], see `BatchLayout`.
        token_rows, positions, out_cache_loc: [T], request after request.
        input_ids: [T] int64, device.
        step_tokens: [T] indices into the tokens of the step that has computed them; None: they waited, or are drafts.
    """

    idx: Int64s
    rows: Int64s
    prefix_lens: Int64s
    extend_lens: Int64s
    token_rows: Int64s
    positions: Int64s
    input_ids: Tensor
    out_cache_loc: Int64s
    step_tokens: Int64s | None = None

    @property
    def lasts(self) -> Int64s:
        """[n] index of each request's last token among the T."""
        lasts: Int64s = np.cumsum(self.extend_lens) - 1
        return lasts

    @classmethod
    def of_step(cls, batch: InputBatch, input_ids: Tensor, idx: Int64s, put: Put) -> Self:
        """The tokens of some of a step's requests.

        Args:
            batch: the step.
            input_ids: [T] of the step; those of `batch` may be relayed.
            idx: ascending, indices into the requests of the step.
        """
        layout = batch.layout
        lens = layout.extend_lens
        tokens = ranges((np.cumsum(lens) - lens)[idx], lens[idx])
        return cls(
            idx,
            layout.rows[idx],
            layout.prefix_lens[idx],
            lens[idx],
            batch.token_rows[tokens],
            batch.positions[tokens],
            input_ids.index_select(0, put(tokens)),
            batch.out_cache_loc[tokens],
            tokens,
        )

    @classmethod
    def of_one_each(
        cls, idx: Int64s, rows: Int64s, positions: Int64s, input_ids: Tensor, out_cache_loc: Int64s
    ) -> Self:
        """One token of each of n requests."""
        return cls(idx, rows, positions, np.ones_like(rows), rows, positions, input_ids, out_cache_loc)

    def layout(self) -> BatchLayout:
        """The layout of a batch of these tokens."""
        longer = np.flatnonzero(self.extend_lens > 1)
        num_extends = int(longer[-1]) + 1 if len(longer) else 0
        return BatchLayout(self.rows, self.prefix_lens, self.extend_lens, num_extends)


class Lag:
    """See the module. Rows of requests without waiting tokens keep stale values."""

    def __init__(self, num_rows: int, max_tokens: int, put: Put) -> None:
        """`max_tokens`: the most tokens of a decode that wait; more are computed at once."""
        self.max_tokens = max_tokens
        self.size = MOST - 1 + max(MOST, max_tokens) + 1
        """Places of a row: position p is in place p % size. Fewer than `MOST` wait when others come, and a last one."""
        self._put = put
        self._done = np.zeros(num_rows, dtype=np.int64)
        self._end = np.zeros(num_rows, dtype=np.int64)
        self._prompt_len = np.zeros(num_rows, dtype=np.int64)
        self._loc = np.zeros((num_rows, self.size), dtype=np.int64)
        self._ids = put(np.zeros(num_rows * self.size, dtype=np.int64))

    def start(self, row: int, prefix_len: int, prompt_len: int) -> None:
        """A request got the row; the pages of its prefix are computed."""
        self._done[row] = self._end[row] = prefix_len
        self._prompt_len[row] = prompt_len

    def may_wait(self, layout: BatchLayout) -> npt.NDArray[np.bool_]:
        """[B] whether the tokens of a step's requests may wait: decodes of not too many tokens."""
        lens, after_prompt = layout.extend_lens, layout.prefix_lens >= self._prompt_len[layout.rows]
        may: npt.NDArray[np.bool_] = (layout.decodes() == 1) & (lens <= self.max_tokens) & after_prompt
        return may

    def done(self, rows: Int64s, ends: Int64s) -> None:
        """The drafter has computed the tokens of rows up to `ends`."""
        self._done[rows], self._end[rows] = ends, ends

    def computed(self, run: Run) -> None:
        """The drafter has computed a run of `take` or `take_with`; without memory for it the tokens still wait."""
        self.done(run.rows, run.prefix_lens + run.extend_lens)

    def reached(self, rows: Int64s, ends: Int64s) -> None:
        """The drafter has computed what waits of rows up to `ends`, [n] each, when it drafted these tokens."""
        self._done[rows] = np.maximum(self._done[rows], np.minimum(ends, self._end[rows]))

    def add(self, token_rows: Int64s, positions: Int64s, out_cache_loc: Int64s, input_ids: Tensor) -> None:
        """The model has computed [T] tokens: at most `MOST` of a row, or `max_tokens`. No row is `full`."""
        places = token_rows * self.size + positions % self.size
        self._loc.reshape(-1)[places] = out_cache_loc
        self._ids.index_copy_(0, self._put(places), input_ids)
        self._end[token_rows] = positions + 1  # of a row that occurs again, the last one counts

    def full(self, rows: Int64s) -> Int64s:
        """The rows, of `rows`, where as many tokens wait as may."""
        return rows[self._end[rows] - self._done[rows] >= MOST]

    def waiting(self, rows: Int64s) -> Int64s:
        """The rows, of `rows`, with waiting tokens."""
        return rows[self._end[rows] > self._done[rows]]

    def take(self, rows: Int64s) -> Run:
        """The waiting tokens of rows, each of which has some; see `computed`."""
        return self._run(rows, self._end[rows])

    def take_with(self, rows: Int64s, positions: Int64s, last_ids: Tensor, last_loc: Int64s) -> Run:
        """The waiting tokens of rows, and after them the last token of each, [n] each; see `computed`."""
        assert (self._end[rows] == positions).all(), (
            "a request has other tokens than those that were computed"
        )
        places = positions % self.size
        self._loc[rows, places] = last_loc
        self._ids.index_copy_(0, self._put(rows * self.size + places), last_ids)
        return self._run(rows, positions + 1)

    def _run(self, rows: Int64s, ends: Int64s) -> Run:
        lens = ends - self._done[rows]
        order = np.argsort(lens == _ONE, kind="stable")  # several tokens first
        rows, lens, prefix = rows[order], lens[order], self._done[rows][order]
        token_rows, positions = np.repeat(rows, lens), ranges(prefix, lens)
        places = positions % self.size
        ids = self._ids.index_select(0, self._put(token_rows * self.size + places))
        return Run(order, rows, prefix, lens, token_rows, positions, ids, self._loc[token_rows, places])


def ranges(starts: Int64s, lens: Int64s) -> Int64s:
    """The numbers start, start + 1, ... of each of n ranges, one after the other."""
    numbers: Int64s = np.repeat(starts - (np.cumsum(lens) - lens), lens) + np.arange(int(lens.sum()))
    return numbers
