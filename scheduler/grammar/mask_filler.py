"""`MaskFiller`: the token masks of one step."""

# Shapes: B requests in the batch, S that sample, R rows of logits (S plus the drafts), W words of a mask.

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...grammar.backend import Matcher
from ...runtime.step_plan import TokenMasks
from ..batch import ScheduleBatch
from ..memory.req_to_token_pool import ReqToTokenPool
from ..requests.req import Req


class _GuidedRows(NamedTuple):
    """The rows of logits of one request.

    Attributes:
        first: its first row of logits; one per draft follows.
        draft_ids: its drafts.
        req, matcher: the request, and its matcher before the drafts.
    """

    first: int
    draft_ids: list[int]
    req: Req
    matcher: Matcher


class MaskFiller:
    """Fills masks into one array, which the next call overwrites.

    The matchers are asked one after the other: with the thread pool of the library a step took 3 to 5 times as long
    beside the model's OpenMP threads (docs/performance.md). All tokens before the step must be settled.
    """

    __slots__ = ("_bits", "_num_words", "_pool")

    def __init__(self, vocab_size: int, pool: ReqToTokenPool) -> None:
        self._pool = pool
        self._num_words = -(-vocab_size // 32)
        self._bits = np.empty((0, self._num_words), dtype=np.int32)

    def fill(self, batch: ScheduleBatch) -> TokenMasks | None:
        """The masks of all rows of logits, drafts included; None if no row is constrained."""
        indices: list[int] = []
        for rows in self._guided(batch):
            self._fill_rows(indices, rows.first, rows.draft_ids, rows.matcher)
        return self._masks(indices)

    def fill_unchecked(self, batch: ScheduleBatch) -> TokenMasks | None:
        """The masks of the rows whose token cannot be checked after sampling."""
        indices: list[int] = []
        for rows in self._guided(batch):
            if not rows.req.is_checked_late:
                self._fill_rows(indices, rows.first, rows.draft_ids, rows.matcher)
        return self._masks(indices)

    def fill_refused(self, batch: ScheduleBatch, token_ids: npt.NDArray[np.int64]) -> TokenMasks | None:
        """The masks of the other rows whose token is not allowed.

        After a draft that is not the token of its row, the rows of a request do not count, and are not checked. After
        a row that is sampled again they may count, so all of them have masks.

        Args:
            batch: of the step.
            token_ids: [R] the token of each row of logits.
        """
        indices: list[int] = []
        for rows in self._guided(batch):
            if rows.req.is_checked_late:
                self._fill_if_refused(indices, rows, token_ids)
        return self._masks(indices)

    def _fill_if_refused(
        self, indices: list[int], rows: _GuidedRows, token_ids: npt.NDArray[np.int64]
    ) -> None:
        matcher = rows.matcher
        for k in range(len(rows.draft_ids) + 1):
            token_id = int(token_ids[rows.first + k])
            if matcher.wants_mask and not matcher.allows(token_id):
                self._fill_rows(indices, rows.first + k, rows.draft_ids[k:], matcher)
                return
            if k == len(rows.draft_ids) or token_id != rows.draft_ids[k]:
                return
            if matcher is rows.matcher:
                matcher = matcher.copy()
            matcher.accept((token_id,))
            if matcher.ended or matcher.error:
                return

    def _fill_rows(self, indices: list[int], first: int, draft_ids: list[int], matcher: Matcher) -> None:
        """Fill the masks of a request's rows from row `first` on, and add the rows to `indices`."""
        start = len(indices)
        if draft_ids:
            num_rows = 1 + len(draft_ids)
            matcher.fill_drafts(draft_ids, self._bits[start : start + num_rows])
            indices += range(first, first + num_rows)
        elif matcher.wants_mask:
            matcher.fill(self._bits[start])
            indices.append(first)

    def _guided(self, batch: ScheduleBatch) -> Iterator[_GuidedRows]:
        """The rows with a grammar that goes on; the tokens of requests that left their row are dropped."""
        drafts = np.frombuffer(batch.plan.draft_ids, dtype=np.int32).tolist()
        num_drafts = np.frombuffer(batch.plan.num_drafts, dtype=np.int32).tolist()
        self._reserve(len(batch.sampled) + len(drafts))
        here = batch.still_here(self._pool)
        first_draft = 0
        for idx, batch_idx in enumerate(batch.sampled.tolist()):
            count = num_drafts[batch_idx] if num_drafts else 0
            req = batch.reqs[batch_idx]
            matcher = req.matcher
            if matcher is not None and here[batch_idx] and not matcher.ended and not matcher.error:
                draft_ids = drafts[first_draft : first_draft + count]
                yield _GuidedRows(idx + first_draft, draft_ids, req, matcher)
            first_draft += count

    def _masks(self, indices: list[int]) -> TokenMasks | None:
        if not indices:
            return None
        return TokenMasks(np.array(indices, dtype=np.int64), self._bits[: len(indices)])

    def _reserve(self, num_rows: int) -> None:
        if num_rows > len(self._bits):
            self._bits = np.empty((2 * num_rows, self._num_words), dtype=np.int32)
