"""The last stage of `sampler`: for each row the best token of its chunks, or of the tokens that pass its filters.

Filters need a threshold (the *floor*): a logit such that k tokens, or the target mass, are at or above it. It is found
by bisection over the integers that order as the logits do; it is exact, and equal logits are on the same side of it.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, possibly-undefined"
# Shapes: S rows, V tokens of the vocabulary, C chunks of a row.

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from .sampler_rows import (
    BAD,
    BEST,
    BEST_ID,
    FILTERED_DRAW,
    KEY_0,
    KEY_1,
    KIND,
    LOG_MIN_P,
    SLOT,
    SUM,
    TOP_K,
    TOP_P,
    figure_at,
    gumbel,
    integer_of,
    number_of,
    order_key,
    scaled_logits,
    sum_of_exp,
)

CHOOSE_WARPS: Final = 8

NOWHERE: tl.constexpr = tl.constexpr(2**31 - 1)  # a token id larger than all others
ONE: tl.constexpr = tl.constexpr(2.0**40)  # mass of the likeliest token; 2**22 such tokens fit into int64


@triton.jit
def choose_kernel(
    logits_ptr,
    logits_stride,
    table_ptr,
    edited_ptr,
    in_output_ptr,
    stats_ptr,
    list_len_ptr,
    list_values_ptr,
    list_ids_ptr,
    bounds_ptr,
    token_ids_ptr,  # [S] int64, written here
    finite_ptr,  # [S] bool, written here
    capacity,
    vocab_size,
    num_chunks,
    HAS_TABLE: tl.constexpr,
    HAS_EDITED: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (S,). Increments the count of the sampled token for the row's penalties."""
    infinity = float("inf")
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0)
    lanes = tl.arange(0, CHUNKS)
    valid = lanes < num_chunks
    bad = tl.load(figure_at(stats_ptr, BAD, row, num_rows, num_chunks, lanes), mask=valid, other=0.0)
    tl.store(finite_ptr + row, tl.max(bad, axis=0) == 0.0)
    maxima = tl.load(
        figure_at(stats_ptr, BEST, row, num_rows, num_chunks, lanes), mask=valid, other=-infinity
    )
    best_ids = tl.load(figure_at(stats_ptr, BEST_ID, row, num_rows, num_chunks, lanes), mask=valid, other=0.0)
    reached = valid & (maxima == tl.max(maxima, axis=0))
    token_id = tl.min(tl.where(reached, best_ids.to(tl.int32, bitcast=True), NOWHERE), axis=0)
    if HAS_FILTERS:  # noqa: SIM102
        if integer_of(table_ptr, row, KIND) == FILTERED_DRAW:
            sums = tl.load(figure_at(stats_ptr, SUM, row, num_rows, num_chunks, lanes), mask=valid, other=0.0)
            largest, total = sum_of_exp(maxima, sums)
            source = (
                tl.load(list_len_ptr + row),
                capacity,
                list_values_ptr + row * capacity,
                list_ids_ptr + row * capacity,
                logits_ptr,
                logits_stride,
                edited_ptr,
            )
            bound = tl.load(bounds_ptr + row)
            token_id = _filtered_draw(source, table_ptr, row, vocab_size, bound, largest, total, BLOCK)
    token_id = tl.minimum(token_id, vocab_size - 1)  # rows with NaN have no candidate
    tl.store(token_ids_ptr + row, token_id.to(tl.int64))
    if HAS_TABLE and HAS_EDITED:
        slot = integer_of(table_ptr, row, SLOT).to(tl.int64)
        if slot >= 0:
            address = in_output_ptr + slot * vocab_size + token_id
            tl.store(address, tl.load(address) + 1)


@triton.jit
def _candidates(source, table_ptr, row, vocab_size, start, BLOCK: tl.constexpr):
    """Values and ids of BLOCK candidates: from the list, or from the whole row if the list overflowed."""
    num_listed, capacity, list_values_ptr, list_ids_ptr, logits_ptr, logits_stride, edited_ptr = source
    places = start + tl.arange(0, BLOCK)
    listed = (places < num_listed) & (num_listed <= capacity)
    values = tl.load(list_values_ptr + places, mask=listed, other=-float("inf"))
    token_ids = tl.load(list_ids_ptr + places, mask=listed, other=NOWHERE)
    if num_listed > capacity:
        token_ids = places
        values = scaled_logits(
            logits_ptr,
            logits_stride,
            edited_ptr,
            table_ptr,
            row,
            token_ids,
            token_ids < vocab_size,
            vocab_size,
        )
    return values, token_ids


@triton.jit
def _num_candidates(source, vocab_size):
    num_listed = source[0]
    return tl.where(num_listed <= source[1], num_listed, vocab_size)


@triton.jit
def _mass(x, largest):
    """Mass of each token, in units of 2**-40 of the likeliest one's: integer sums do not depend on the order."""
    return (tl.exp(x - largest) * ONE).to(tl.int64)


@triton.jit
def _tally(
    at_least,
    first_key,
    first_mass,
    source,
    table_ptr,
    row,
    vocab_size,
    largest,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Number, or total mass, of the candidates with this `order_key` or a higher one.

    The first block of candidates, usually all of them, stays in registers.
    """
    if BY_MASS:
        found = tl.sum(tl.where(first_key >= at_least, first_mass, 0), axis=0)
    else:
        found = tl.sum((first_key >= at_least).to(tl.int32), axis=0).to(tl.int64)
    num_candidates = _num_candidates(source, vocab_size)
    start = num_candidates * 0 + BLOCK
    while start < num_candidates:
        x, _ = _candidates(source, table_ptr, row, vocab_size, start, BLOCK)
        reached = order_key(x) >= at_least
        if BY_MASS:
            found += tl.sum(tl.where(reached, _mass(x, largest), 0), axis=0)
        else:
            found += tl.sum(reached.to(tl.int32), axis=0).to(tl.int64)
        start += BLOCK
    return found


@triton.jit
def _floor(
    target,
    low,
    high,
    first_key,
    first_mass,
    source,
    table_ptr,
    row,
    vocab_size,
    largest,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """An `order_key` that separates the smallest set of top candidates that reaches the target from the others.

    Args:
        low: all candidates are at or above it; returned if all of them together do not reach the target.
        high: no candidate is at or above it.
    """
    found_low = target + 1
    # Up to 32 steps. By count the search ends at exactly k tokens: any key between two logits will do. A mass is
    # narrowed down to the last bit, because the next token may complete it.
    while (high - low > 1) & (BY_MASS | (found_low != target)):
        middle = (low + high) >> 1
        found = _tally(
            middle.to(tl.int32), first_key, first_mass, source, table_ptr, row, vocab_size, largest, BY_MASS, BLOCK
        )  # fmt: skip
        found_low = tl.where(found >= target, found, found_low)
        low = tl.where(found >= target, middle, low)
        high = tl.where(found >= target, high, middle)
    return low


@triton.jit
def _filtered_draw(source, table_ptr, row, vocab_size, bound, largest, total, BLOCK: tl.constexpr):
    """Find the filters' floor exactly, then the best of the tokens above it with their noise.

    k tokens, or the target mass, are at or above the floor; no higher logit has that property.
    """
    top_k = integer_of(table_ptr, row, TOP_K)
    top_p = number_of(table_ptr, row, TOP_P)
    x, token_ids = _candidates(source, table_ptr, row, vocab_size, 0, BLOCK)
    first_key = order_key(x)
    first_mass = _mass(x, largest)
    floor = order_key(bound).to(tl.int64)
    ceiling = order_key(largest).to(tl.int64) + 1
    if top_k > 0:
        target = top_k.to(tl.int64)
        floor = _floor(
            target, floor, ceiling, first_key, first_mass, source, table_ptr, row, vocab_size, largest, False, BLOCK
        )  # fmt: skip
    if top_p < 1.0:
        mass = (total * ONE).to(tl.int64)
        if top_k > 0:
            mass = _tally(
                floor.to(tl.int32), first_key, first_mass, source, table_ptr, row, vocab_size, largest, True, BLOCK
            )  # fmt: skip
        target = (mass.to(tl.float32) * top_p).to(tl.int64)
        floor = _floor(
            target, floor, ceiling, first_key, first_mass, source, table_ptr, row, vocab_size, largest, True, BLOCK
        )  # fmt: skip
    floor_key = floor.to(tl.int32)
    min_p_floor = largest + number_of(table_ptr, row, LOG_MIN_P)
    key_0 = integer_of(table_ptr, row, KEY_0)
    key_1 = integer_of(table_ptr, row, KEY_1)
    num_candidates = _num_candidates(source, vocab_size)
    best = tl.full([], -float("inf"), tl.float32)
    best_id = tl.full([], NOWHERE, tl.int32)
    start = num_candidates * 0
    while start < num_candidates:
        kept = (order_key(x) >= floor_key) & (x >= min_p_floor)
        x = tl.where(kept, x + gumbel(token_ids, key_0, key_1), -float("inf"))
        block_best = tl.max(x, axis=0)
        block_id = tl.min(tl.where(x == block_best, token_ids, NOWHERE), axis=0)
        block_id = tl.where(block_best == best, tl.minimum(block_id, best_id), block_id)
        best_id = tl.where(block_best >= best, block_id, best_id)
        best = tl.maximum(best, block_best)
        start += BLOCK
        x, token_ids = _candidates(source, table_ptr, row, vocab_size, start, BLOCK)
    return best_id
