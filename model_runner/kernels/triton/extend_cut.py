"""`cut_extends`: divides prefill attention among programs; computed on the host, once per step and window."""

# Shapes: n requests with several new tokens, T new tokens, NB blocks (each some tokens of a request and a part of their
# keys), P partial results of all tokens.

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .attention_combine import SPAN

Int64s = npt.NDArray[np.int64]

BLOCK_NUMBERS: Final = 8
"""Integers per block: index of its first token in the batch, number of tokens, position of the first token, row, first
key, end of the keys (exclusive), index of the first token's partial result (-1 if the block has all keys); rest
unused."""
_PART_KEYS: Final = 128  # parts begin at multiples of it: whole tiles for every tile size
_MIN_PART: Final = 2  # minimum size of a part, in units of `_PART_KEYS`; a smaller part does not pay


class ExtendCut(NamedTuple):
    """Result of `cut_extends`: `blocks` and `spans` as in `ExtendPlan`, on the host, and the number of parts P."""

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
    *,
    chunked: bool = False,
    sees_to: Int64s | None = None,
) -> ExtendCut:
    """Cut the tokens of the requests into blocks; if the blocks are too few, split their keys into parts.

    The blocks with most keys come first, so that the programs that start last are short.

    Args:
        starts, rows, prefix_lens, extend_lens: [n], of the requests with several new tokens.
        num_blocks_wanted: number of blocks that fills the GPU.
        chunked: the window is a chunk, see `AttentionForm`.
        sees_to: [T] see `BatchLayout`.
    """
    counts = -(-extend_lens // tokens_per_block)
    request = np.repeat(np.arange(len(rows)), counts)
    offset = _count_up(counts) * tokens_per_block
    token = starts[request] + offset
    num_tokens = np.minimum(extend_lens[request] - offset, tokens_per_block)
    position = prefix_lens[request] + offset
    end = position + num_tokens
    if sees_to is not None:
        end = np.maximum(end, sees_to[token + num_tokens - 1])
    begin = np.zeros_like(end)
    if window is not None:
        begin = position // window * window if chunked else np.maximum(position - window + 1, 0)

    # Number of parts of each block; parts are measured in units that begin at multiples of `_PART_KEYS`.
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
