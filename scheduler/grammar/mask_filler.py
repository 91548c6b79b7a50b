"""`MaskFiller`: the token masks of one step."""

# Shapes: B requests in the batch, S that sample, R rows of logits (S plus the drafts), W words of a mask.

from __future__ import annotations

import numpy as np

from ...runtime.step_plan import TokenMasks
from ..arrays import BoolArray
from ..batch import ScheduleBatch


class MaskFiller:
    """Fills masks into one array, which the next step overwrites.

    The matchers are asked one after the other: with the thread pool of the library a step took 3 to 5 times as long
    beside the model's OpenMP threads (docs/performance.md).
    """

    __slots__ = ("_bits", "_num_words")

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._bits = np.empty((0, self._num_words), dtype=np.int32)

    def fill(self, batch: ScheduleBatch, here: BoolArray) -> TokenMasks | None:
        """The masks of the batch's rows of logits; None if no row is constrained.

        Args:
            batch: its tokens up to this step are settled.
            here: [B] requests that still have their row; the tokens of the others are dropped.
        """
        drafts = np.frombuffer(batch.plan.draft_ids, dtype=np.int32).tolist()
        num_drafts = np.frombuffer(batch.plan.num_drafts, dtype=np.int32).tolist() or [0] * len(batch)
        indices: list[int] = []
        first_row = first_draft = 0
        self._reserve(len(batch.sampled) + len(drafts))
        for batch_idx in batch.sampled.tolist():
            count = num_drafts[batch_idx]
            matcher = batch.reqs[batch_idx].matcher if here[batch_idx] else None
            if matcher is not None and not matcher.ended and not matcher.error:
                start = len(indices)
                if count:
                    rows = self._bits[start : start + 1 + count]
                    matcher.fill_drafts(drafts[first_draft : first_draft + count], rows)
                    indices += range(first_row, first_row + 1 + count)
                elif matcher.wants_mask:
                    matcher.fill(self._bits[start])
                    indices.append(first_row)
            first_row += 1 + count
            first_draft += count
        if not indices:
            return None
        return TokenMasks(np.array(indices, dtype=np.int64), self._bits[: len(indices)])

    def _reserve(self, num_rows: int) -> None:
        if num_rows > len(self._bits):
            self._bits = np.empty((2 * num_rows, self._num_words), dtype=np.int32)
