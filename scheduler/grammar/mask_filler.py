"""`MaskFiller`: the token masks of one step."""

# Shapes: B requests in the batch, S that sample, R rows of logits (S plus the drafts), W words of a mask.

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ...grammar.backend import Matcher
from ...runtime.step_plan import TokenMasks
from ..batch import ScheduleBatch
from ..memory.req_to_token_pool import ReqToTokenPool
from ..requests.req import Req


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
        drafts = np.frombuffer(batch.plan.draft_ids, dtype=np.int32).tolist()
        num_drafts = np.frombuffer(batch.plan.num_drafts, dtype=np.int32)
        counts = num_drafts[batch.sampled].tolist() if len(num_drafts) else [0] * len(batch.sampled)
        first_rows, first_drafts = (
            np.cumsum([0, *counts]) + np.arange(len(counts) + 1),
            np.cumsum([0, *counts]),
        )
        indices: list[int] = []
        self._reserve(len(batch.sampled) + len(drafts))
        for row, _, matcher in self._guided(batch):
            count, start = counts[row], len(indices)
            if count:
                first = int(first_drafts[row])
                matcher.fill_drafts(drafts[first : first + count], self._bits[start : start + 1 + count])
                indices += range(int(first_rows[row]), int(first_rows[row]) + 1 + count)
            elif matcher.wants_mask:
                matcher.fill(self._bits[start])
                indices.append(int(first_rows[row]))
        return self._masks(indices)

    def fill_unchecked(self, batch: ScheduleBatch) -> TokenMasks | None:
        """The masks of the rows whose token cannot be checked after sampling; in a step without drafts."""
        indices: list[int] = []
        self._reserve(len(batch.sampled))
        for row, req, matcher in self._guided(batch):
            if not req.is_checked_late and matcher.wants_mask:
                matcher.fill(self._bits[len(indices)])
                indices.append(row)
        return self._masks(indices)

    def fill_refused(self, batch: ScheduleBatch, token_ids: npt.NDArray[np.int64]) -> TokenMasks | None:
        """The masks of the other rows whose token is not allowed.

        Args:
            batch: of a step without drafts.
            token_ids: [S] the token of each row.
        """
        indices: list[int] = []
        self._reserve(len(batch.sampled))
        for row, req, matcher in self._guided(batch):
            if req.is_checked_late and matcher.wants_mask:
                token_id = int(token_ids[row])
                if not matcher.allows(token_id):
                    matcher.fill(self._bits[len(indices)])
                    indices.append(row)
        return self._masks(indices)

    def _guided(self, batch: ScheduleBatch) -> Iterator[tuple[int, Req, Matcher]]:
        """The rows ([S]) with a grammar that goes on; the tokens of requests that left their row are dropped."""
        here = batch.still_here(self._pool)
        for row, batch_idx in enumerate(batch.sampled.tolist()):
            req = batch.reqs[batch_idx]
            matcher = req.matcher
            if matcher is not None and here[batch_idx] and not matcher.ended and not matcher.error:
                yield row, req, matcher

    def _masks(self, indices: list[int]) -> TokenMasks | None:
        if not indices:
            return None
        return TokenMasks(np.array(indices, dtype=np.int64), self._bits[: len(indices)])

    def _reserve(self, num_rows: int) -> None:
        if num_rows > len(self._bits):
            self._bits = np.empty((2 * num_rows, self._num_words), dtype=np.int32)
