"""`Lag`: the tokens that the model has computed and a drafter has not yet.

A drafter computes every token of the model once more, because pages with its keys and values are shared like the
model's. It need not do so in the same step: several tokens at once cost less than one after the other, and the first
draft of a step is what follows the last of them. So the tokens of decodes wait until the request is drafted for, its
page is full (from the next step on it may be shared), or it leaves its row:

    computed by the drafter | wait        | the step's last token, drafts
    0 ................ done | done .. end | position

Prompts do not wait: they are many tokens at once already. Of larger pages parts of 16 tokens are like pages.
"""

# Shapes: n requests, T tokens of them.

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from ..attention.backend import BatchLayout

if TYPE_CHECKING:
    from torch import Tensor

    from ..input_batch import InputBatch

Int64s = npt.NDArray[np.int64]
Put = Callable[[npt.NDArray[Any]], "Tensor"]

_ONE: Final = 1
_MOST: Final = 16
"""Tokens of a row that wait at most, so that their states take little memory; more at once cost hardly less."""


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

    def __init__(self, num_rows: int, page_size: int, max_tokens: int, put: Put) -> None:
        """`max_tokens`: the most tokens of a decode that wait; more are computed at once."""
        self._part_size = math.gcd(page_size, _MOST)
        self.max_tokens = max_tokens
        self.size = self._part_size + max_tokens + 1
        """Places of a row: position p is in place p % size."""
        self._put = put
        self._done = np.zeros(num_rows, dtype=np.int64)
        self._end = np.zeros(num_rows, dtype=np.int64)
        self._loc = np.zeros((num_rows, self.size), dtype=np.int64)
        self._ids = put(np.zeros(num_rows * self.size, dtype=np.int64))

    def start(self, row: int, prefix_len: int) -> None:
        """A request got the row; the pages of its prefix are computed."""
        self._done[row] = self._end[row] = prefix_len

    def done(self, rows: Int64s, ends: Int64s) -> None:
        """The drafter has computed the tokens of rows up to `ends`."""
        self._done[rows], self._end[rows] = ends, ends

    def computed(self, run: Run) -> None:
        """The drafter has computed a run of `take` or `take_with`; without memory for it the tokens still wait."""
        self.done(run.rows, run.prefix_lens + run.extend_lens)

    def reached(self, rows: Int64s, ends: Int64s) -> None:
        """The drafter has computed what waits of rows up to `ends`, [n] each, when it drafted these tokens."""
        self._done[rows] = np.maximum(self._done[rows], np.minimum(ends, self._end[rows]))

    def add(self, batch: InputBatch, input_ids: Tensor, idx: Int64s, valid: Int64s) -> None:
        """The model has computed tokens of the decodes `idx` of a step, of which the first `valid`, [n], are right.

        `input_ids`: as for `Run.of_step`.
        """
        layout = batch.layout
        token_rows, positions, loc = batch.token_rows, batch.positions, batch.out_cache_loc
        if len(idx) < len(positions):  # else one token each
            tokens = ranges((np.cumsum(layout.extend_lens) - layout.extend_lens)[idx], valid)
            token_rows, positions, loc = token_rows[tokens], positions[tokens], loc[tokens]
            input_ids = input_ids.index_select(0, self._put(tokens))
        places = token_rows * self.size + positions % self.size
        self._loc.reshape(-1)[places] = loc
        self._ids.index_copy_(0, self._put(places), input_ids)
        self._end[layout.rows[idx]] = layout.prefix_lens[idx] + valid

    def full(self, rows: Int64s) -> Int64s:
        """The rows, of `rows`, with waiting tokens of a full page."""
        done, end = self._done[rows], self._end[rows]
        return rows[end // self._part_size > done // self._part_size]

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
