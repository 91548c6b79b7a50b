"""`Lag`: the tokens that the model has computed and a drafter has not yet.

A drafter computes every token of the model once more, because pages with its keys and values are shared like the
model's. It need not do so in the same step: several tokens at once cost less than one after the other, and the first
draft of a step is what follows the last of them. So the tokens of decodes wait until the request is drafted for, its
page is full (from the next step on it may be shared), or it leaves its row:

    computed by the drafter | wait        | the step's last token, drafts
    0 ................ done | done .. end | position

Prompts do not wait: they are many tokens at once already.
"""

# Shapes: n requests, T tokens of them.

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from ..attention.backend import BatchLayout

if TYPE_CHECKING:
    from ..input_batch import InputBatch

Int64s = npt.NDArray[np.int64]

_ONE: Final = 1


class Run(NamedTuple):
    """Consecutive tokens of n requests; host arrays. Requests with several tokens come first.

    Attributes:
        idx: [n] index of each request in what was asked for.
        rows, prefix_lens, extend_lens: [n], see `BatchLayout`.
        token_rows, positions, input_ids, out_cache_loc: [T], request after request.
        step_tokens: [T] indices into the tokens of the step that has computed them; None: they waited, or are drafts.
    """

    idx: Int64s
    rows: Int64s
    prefix_lens: Int64s
    extend_lens: Int64s
    token_rows: Int64s
    positions: Int64s
    input_ids: Int64s
    out_cache_loc: Int64s
    step_tokens: Int64s | None = None

    @property
    def lasts(self) -> Int64s:
        """[n] index of each request's last token among the T."""
        lasts: Int64s = np.cumsum(self.extend_lens) - 1
        return lasts

    @classmethod
    def of_step(cls, batch: InputBatch, input_ids: Int64s, idx: Int64s) -> Self:
        """The tokens of some of a step's requests.

        Args:
            batch: the step.
            input_ids: [T] of the step; those of `batch` may be relayed.
            idx: ascending, indices into the requests of the step.
        """
        layout = batch.layout
        chosen = np.zeros(len(layout.rows), dtype=np.bool_)
        chosen[idx] = True
        tokens = np.flatnonzero(np.repeat(chosen, layout.extend_lens))
        return cls(
            idx,
            layout.rows[idx],
            layout.prefix_lens[idx],
            layout.extend_lens[idx],
            batch.token_rows[tokens],
            batch.positions[tokens],
            input_ids[tokens],
            batch.out_cache_loc[tokens],
            tokens,
        )

    @classmethod
    def of_one_each(
        cls, idx: Int64s, rows: Int64s, positions: Int64s, input_ids: Int64s, out_cache_loc: Int64s
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

    def __init__(self, num_rows: int, page_size: int, max_tokens: int) -> None:
        """`max_tokens`: the most tokens of a decode that wait; more are computed at once."""
        self._page_size = page_size
        self.max_tokens = max_tokens
        self.size = page_size + max_tokens + 1
        """Places of a row: position p is in place p % size."""
        self._done = np.zeros(num_rows, dtype=np.int64)
        self._end = np.zeros(num_rows, dtype=np.int64)
        self._ids = np.zeros((num_rows, self.size), dtype=np.int64)
        self._loc = np.zeros((num_rows, self.size), dtype=np.int64)

    def start(self, row: int, prefix_len: int) -> None:
        """A request got the row; the pages of its prefix are computed."""
        self._done[row] = self._end[row] = prefix_len

    def done(self, rows: Int64s, ends: Int64s) -> None:
        """The drafter has computed the tokens of rows up to `ends`."""
        self._done[rows], self._end[rows] = ends, ends

    def reached(self, rows: Int64s, ends: Int64s) -> None:
        """The drafter has computed what waits of rows up to `ends`, [n] each, when it drafted these tokens."""
        self._done[rows] = np.maximum(self._done[rows], np.minimum(ends, self._end[rows]))

    def add(self, run: Run, valid: Int64s) -> None:
        """The model has computed these tokens of decodes, of which the first `valid` [n] of each request are right."""
        starts = np.cumsum(run.extend_lens) - run.extend_lens
        offsets = np.arange(int(valid.sum())) - np.repeat(np.cumsum(valid) - valid, valid)
        tokens = np.repeat(starts, valid) + offsets
        rows, places = run.token_rows[tokens], run.positions[tokens] % self.size
        self._ids[rows, places], self._loc[rows, places] = run.input_ids[tokens], run.out_cache_loc[tokens]
        self._end[run.rows] = run.prefix_lens + valid

    def full(self, rows: Int64s) -> Int64s:
        """The rows, of `rows`, with waiting tokens of a full page."""
        done, end = self._done[rows], self._end[rows]
        return rows[end // self._page_size > done // self._page_size]

    def waiting(self, rows: Int64s) -> Int64s:
        """The rows, of `rows`, with waiting tokens."""
        return rows[self._end[rows] > self._done[rows]]

    def take(self, rows: Int64s) -> Run:
        """The waiting tokens of rows, each of which has some; they count as computed."""
        return self._run(rows, self._end[rows].copy())

    def take_with(self, rows: Int64s, positions: Int64s, last_ids: Int64s, last_loc: Int64s) -> Run:
        """The waiting tokens of rows, and after them the last token of each, [n] each; all count as computed."""
        assert (self._end[rows] == positions).all(), (
            "a request has other tokens than those that were computed"
        )
        places = positions % self.size
        self._ids[rows, places], self._loc[rows, places] = last_ids, last_loc
        return self._run(rows, positions + 1)

    def _run(self, rows: Int64s, ends: Int64s) -> Run:
        lens = ends - self._done[rows]
        order = np.argsort(lens == _ONE, kind="stable")  # several tokens first
        rows, lens, prefix = rows[order], lens[order], self._done[rows][order]
        offsets = np.arange(int(lens.sum())) - np.repeat(np.cumsum(lens) - lens, lens)
        token_rows, positions = np.repeat(rows, lens), np.repeat(prefix, lens) + offsets
        places = positions % self.size
        run = Run(
            order,
            rows,
            prefix,
            lens,
            token_rows,
            positions,
            self._ids[token_rows, places],
            self._loc[token_rows, places],
        )
        self._done[rows], self._end[rows] = prefix + lens, np.maximum(self._end[rows], prefix + lens)
        return run
