"""`cut_extends`: which program of a prefill computes what; arithmetic on the host, once per step and window."""

# Shapes: n requests with several new tokens, T new tokens, NB blocks (each some tokens of a request and a part of their
# keys), P parts of all tokens.

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .attention_combine import SPAN

Int64s = npt.NDArray[np.int64]

BLOCK_NUMBERS: Final = 8
"""Of a block: its first token in the batch, how many, the position of the first, row, first key, behind the last key,
and where the first token's part goes, or -1 if it is the only one; the rest is unused."""
_PART_KEYS: Final = 128  # keys are cut at multiples of it: whole tiles, whatever their size
_MIN_PART: Final = 2  # times `_PART_KEYS`: fewer keys are not worth another part


class ExtendCut(NamedTuple):
    """What `cut_extends` made: `blocks` and `spans` as in `ExtendPlan`, on the host, and the number of parts P."""

    blocks: npt.NDArray[np.int32]
    spans: npt.NDArray[np.int32]
    num_parts: int


def cut_extends(
    starts: Int64s,
    rows: Int64s,
    prefix_lens: Int64s,
    extend_lens: Int64s,
    tokens_per_block: int,
    window: int | None,
    num_blocks_wanted: int,
) -> ExtendCut:
    """Cut the requests' tokens into blocks, and where these are fewer than wanted, their keys into parts.

    Those with the most keys come first: what starts last should be over soon.

    Args:
        starts, rows, prefix_lens, extend_lens: [n] of the requests with several new tokens.
        num_blocks_wanted: that fill the GPU.
    """
    counts = -(-extend_lens // tokens_per_block)
    request = np.repeat(np.arange(len(rows)), counts)
    offset = _count_up(counts) * tokens_per_block
    token = starts[request] + offset
    num_tokens = np.minimum(extend_lens[request] - offset, tokens_per_block)
    position = prefix_lens[request] + offset
    end = position + num_tokens
    begin = np.zeros_like(end) if window is None else np.maximum(position - window + 1, 0)

    # Of each block: how many parts, in units that begin at multiples of `_PART_KEYS`.
    first_unit = begin // _PART_KEYS
    units = -(-end // _PART_KEYS) - first_unit
    parts = np.ones_like(units)
    if len(request) < num_blocks_wanted:
        parts = np.clip(units * num_blocks_wanted // units.sum(), 1, np.maximum(units // _MIN_PART, 1))
    sizes = np.where(parts > 1, parts * num_tokens, 0)
    first_part = np.cumsum(sizes) - sizes
    spans = np.empty((0, SPAN), dtype=np.int32)
    if sizes.any():
        by_token = np.repeat(np.stack((first_part, parts, num_tokens), axis=1), num_tokens, axis=0)
        by_token[:, 0] += _count_up(num_tokens)
        spans = by_token.astype(np.int32)

    block = np.repeat(np.arange(len(request)), parts)
    part = _count_up(parts)
    part_begin = (first_unit[block] + part * units[block] // parts[block]) * _PART_KEYS
    part_end = (first_unit[block] + (part + 1) * units[block] // parts[block]) * _PART_KEYS
    begins, ends = np.maximum(part_begin, begin[block]), np.minimum(part_end, end[block])
    goes_to = np.where(parts[block] > 1, first_part[block] + part * num_tokens[block], -1)
    columns = (token[block], num_tokens[block], position[block], rows[request[block]], begins, ends, goes_to)
    blocks = np.zeros((len(block), BLOCK_NUMBERS), dtype=np.int32)
    blocks[:, : len(columns)] = np.stack(columns, axis=1)
    return ExtendCut(blocks[np.argsort(begins - ends, kind="stable")], spans, int(sizes.sum()))


def _count_up(counts: Int64s) -> Int64s:
    """0, 1, ... for each of the counts: [2, 3] -> [0, 1, 0, 1, 2]."""
    numbers: Int64s = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return numbers
