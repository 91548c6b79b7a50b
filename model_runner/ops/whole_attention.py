"""Attention without pages and without order: each row of a run attends to all rows of it, as in towers of images."""

# Shapes: T rows, H heads, D head dim.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor


class WholeAttention(Protocol):
    """softmax(q k^T * scale) v by head, within runs of rows."""

    def padded(self, qkv: Tensor) -> Tensor:
        """[any, 3 * H * D] -> [any, 3, H, D'], contiguous; D' >= D, as the calls take it."""
        ...

    def __call__(self, qkv: Tensor, lengths: Sequence[int] | None = None, at: slice | None = None) -> Tensor:
        """Attend.

        Args:
            qkv: [T, 3, H, D'] contiguous, in the dtype of the result: what `padded` gives.
            lengths: rows of each run, one run after the other; they sum to T. None: all T rows are one run.
            at: the rows that attend, without `lengths`; None: all.

        Returns:
            [rows that attend, H * D].
        """
        ...


MakeWholeAttention = Callable[[int, int, float], WholeAttention]
"""(H, D, scale) -> the attention; all layers of a tower may share it, which is used by one thread at a time."""
