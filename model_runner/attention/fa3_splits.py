"""`max_splits`: into how many parts FlashAttention-3 may split the keys of one step.

A split step has partial outputs in float32, [splits, Hq, T, D], for the *largest* number of splits that the device may
choose. FA3's own bound is computed as if the step were its longest request alone, so a step of many short extends has
a large one: 1.9 GiB at 8,192 tokens of 32 heads of 128, allocated in each layer, although the device then chooses one
split for nearly all requests. Here the bound is what the device will choose, from the lengths that the host knows, and
no more than fits into a fixed size.

The rule of the device is that of `hopper/flash_prepare_scheduler.cu` in flash-attention: each multiprocessor should get
the same number of blocks, with a tenth to spare.
"""

# Shapes: B requests, T new tokens in the batch, Hq query heads, H KV heads on this rank, D head dim.

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from .backend import Int64s

PARTIAL_BYTES: Final = 256 << 20
"""Largest size of the partial outputs of a step; a step of few tokens, where splits matter, never needs as much."""

_MOST_SPLITS: Final = 128  # FA3's own limit of its choice
_MOST_PLANNED: Final = 992  # requests; the device does not choose the splits of larger batches
_FEW_KEY_BLOCKS: Final = 4  # that are never split
_MARGIN: Final = np.float32(1.1)
_FLOAT32_BYTES: Final = 4


class SplitShape(NamedTuple):
    """Facts besides the lengths on which the number of splits depends.

    Attributes:
        num_heads, num_kv_heads, head_dim: of this rank.
        window: see `ModelSpec.window_of`.
        num_sms: multiprocessors of the device.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    num_sms: int

    @property
    def block_rows(self) -> int:
        """Query rows of a block; the rows of a KV head's query heads are packed together."""
        return 192 if self.head_dim <= 96 else 128

    @property
    def block_keys(self) -> int:
        """Keys of a block."""
        if self.head_dim <= 128:
            return 128
        return 96 if self.head_dim <= 192 else 80


def max_splits(query_lens: Int64s, key_lens: Int64s, shape: SplitShape) -> int:
    """The bound for a step; 1: it is not split, and has no partial outputs.

    Args:
        query_lens: [B] new tokens.
        key_lens: [B] tokens, the new ones included.
    """
    if not 0 < len(query_lens) <= _MOST_PLANNED:
        return 1
    if shape.window is not None:
        key_lens = np.minimum(key_lens, shape.window + shape.block_rows)
    rows = query_lens * (shape.num_heads // shape.num_kv_heads)
    row_blocks, key_blocks = -(-rows // shape.block_rows), -(-key_lens // shape.block_keys)
    longest = int(key_blocks.max())
    if longest <= _FEW_KEY_BLOCKS:
        return 1
    # In the device's precision and order: other roundings give another number where the quotient is whole.
    num_blocks = np.float32((row_blocks * key_blocks).sum())
    blocks_per_sm = num_blocks * _MARGIN * np.float32(shape.num_kv_heads) / np.float32(shape.num_sms)
    chosen = -(-longest // math.ceil(blocks_per_sm))
    one_bytes = int(query_lens.sum()) * shape.num_heads * shape.head_dim * _FLOAT32_BYTES
    return max(1, min(chosen, _MOST_SPLITS, PARTIAL_BYTES // one_bytes))
