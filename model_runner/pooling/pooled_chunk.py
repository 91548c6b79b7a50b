"""`PooledChunk`: a prompt chunk of a pooling request, as a part of an `InputBatch`."""

# Shapes: W tokens that need logits or hidden states, see `InputBatch`.

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ...runtime.pooling import PoolingParams


class PooledChunk(NamedTuple):
    """The tokens of a chunk that a pooling request needs.

    Attributes:
        batch_idx: the request's index in the batch.
        row: its pool row.
        start: index, among the W, of the first token that it needs; the others follow one by one.
        num_tokens: all tokens of the chunk, or (`PoolingParams.all_tokens` is False) the last one of the prompt.
        prompt_len: tokens of the prompt.
        begins, ends: whether the chunk has the first and the last token of the prompt.
        params: what to compute.
    """

    batch_idx: int
    row: int
    start: int
    num_tokens: int
    prompt_len: int
    begins: bool
    ends: bool
    params: PoolingParams
