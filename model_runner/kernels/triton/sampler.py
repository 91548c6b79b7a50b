"""Sampling: two launches for a whole batch, three if any row filters; no sort of the vocabulary.

    survey      a program per chunk of a row   penalties, biases, grammar; the chunk's best token (of the logits, or
                                               with noise); max, sum of exp and group maxima for the filters
    shortlist   the same, for filtered rows    a lower bound of the filters' threshold, from the statistics of all
                                               chunks; tokens above it are appended to the row's list
    choose      a program per row              the best of the chunks; or the filters' exact threshold by bisection over
                                               the list, and the best of the remaining tokens

The last stage is `sampler_choose`; `sampler_rows` has what the stages share.

A row never depends on the rest of the batch: chunks have a fixed size. The list has no fixed order, so its masses are
added up as integers, in units of 2^-40 of the likeliest token's mass.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, possibly-undefined"
# Shapes: S rows, V tokens of the vocabulary, C chunks of a row, m edits.

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from .sampler_rows import (
    BAD,
    BEST,
    BEST_ID,
    DRAW,
    EDITED,
    EDITS_START,
    EDITS_STOP,
    FILTERED_DRAW,
    FREQUENCY,
    GRAMMAR,
    GREEDY,
    KEY_0,
    KEY_1,
    KIND,
    LOG_MIN_P,
    PRESENCE,
    REPETITION,
    SLOT,
    SUM,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    figure_at,
    gumbel,
    integer_of,
    number_of,
    scaled_logits,
    sum_of_exp,
)

SURVEY_WARPS: Final = 4

BOUND_MARGIN: tl.constexpr = tl.constexpr(0.01)  # in nats; rounding must not exclude a token of the nucleus
BOUND_STEPS: tl.constexpr = tl.constexpr(12)


@triton.jit(do_not_specialize=["grammar_stride"])
def survey_kernel(
    logits_ptr,  # [S, V] float32, or a dtype that is widened to it
    logits_stride,
    table_ptr,  # [S, WIDTH] int32
    edited_ptr,  # [rows with edits, V] float32, written here: the processed logits
    in_prompt_ptr,  # [N, V] uint8
    in_output_ptr,  # [N, V] int32
    edit_ids_ptr,  # [m] int32, grouped by row; each token at most once per row
    edit_values_ptr,  # [m] float32
    grammar_ptr,  # [rows with a grammar, words] int32
    grammar_stride,
    stats_ptr,  # [4, S, C] float32, written here
    group_max_ptr,  # [S, C * CHUNK / GROUP] float32, written here for filtered rows
    list_len_ptr,  # [S] int32, set to 0 here
    vocab_size,
    HAS_TABLE: tl.constexpr,
    HAS_EDITED: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Grid (C, S)."""
    infinity = float("inf")
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    num_chunks = tl.num_programs(0)
    num_rows = tl.num_programs(1)
    token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token_ids < vocab_size
    x = tl.load(logits_ptr + row * logits_stride + token_ids, mask=inside, other=0.0).to(tl.float32)
    bad = tl.max((tl.abs(x) < infinity).to(tl.int32) ^ 1, axis=0)
    tl.store(figure_at(stats_ptr, BAD, row, num_rows, num_chunks, chunk), bad.to(tl.float32))
    x = tl.where(inside, x, -infinity)
    if HAS_TABLE:
        if HAS_EDITED:
            edited_row = integer_of(table_ptr, row, EDITED)
            if edited_row >= 0:
                x = _processed(
                    x,
                    table_ptr,
                    edited_ptr + edited_row.to(tl.int64) * vocab_size,
                    in_prompt_ptr,
                    in_output_ptr,
                    edit_ids_ptr,
                    edit_values_ptr,
                    grammar_ptr,
                    grammar_stride,
                    vocab_size,
                    row,
                    chunk,
                    CHUNK,
                )
        kind = integer_of(table_ptr, row, KIND)
        if kind != GREEDY:
            x = tl.div_rn(x, number_of(table_ptr, row, TEMPERATURE))
        if kind == DRAW:
            x += gumbel(token_ids, integer_of(table_ptr, row, KEY_0), integer_of(table_ptr, row, KEY_1))
        if kind == FILTERED_DRAW:
            largest = tl.max(x, axis=0)
            shift = tl.where(largest == -infinity, 0.0, largest)
            total = tl.sum(tl.exp(x - shift), axis=0)
            tl.store(figure_at(stats_ptr, SUM, row, num_rows, num_chunks, chunk), total)
            groups: tl.constexpr = CHUNK // GROUP
            group_max = tl.max(tl.reshape(x, (groups, GROUP)), axis=1)
            first = (row * num_chunks + chunk) * groups
            tl.store(group_max_ptr + first + tl.arange(0, groups), group_max)
            if chunk == 0:
                tl.store(list_len_ptr + row, 0)
    best, best_idx = tl.max(x, axis=0, return_indices=True)
    tl.store(figure_at(stats_ptr, BEST, row, num_rows, num_chunks, chunk), best)
    best_id = (chunk * CHUNK + best_idx).to(tl.int32)
    tl.store(
        figure_at(stats_ptr, BEST_ID, row, num_rows, num_chunks, chunk),
        best_id.to(tl.float32, bitcast=True),
    )


@triton.jit
def _processed(
    x,
    table_ptr,
    edited_ptr,  # this row of it
    in_prompt_ptr,
    in_output_ptr,
    edit_ids_ptr,
    edit_values_ptr,
    grammar_ptr,
    grammar_stride,
    vocab_size,
    row,
    chunk,
    CHUNK: tl.constexpr,
):
    """Penalties, grammar and edits as in `logits.process_logits`, also stored. A bias cannot allow a masked token."""
    infinity = float("inf")
    start = chunk * CHUNK
    token_ids = start + tl.arange(0, CHUNK)
    inside = token_ids < vocab_size
    slot = integer_of(table_ptr, row, SLOT).to(tl.int64)
    if slot >= 0:
        repetition = number_of(table_ptr, row, REPETITION)
        count = tl.load(in_output_ptr + slot * vocab_size + token_ids, mask=inside, other=0)
        in_prompt = tl.load(in_prompt_ptr + slot * vocab_size + token_ids, mask=inside, other=0)
        scaled = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where((in_prompt != 0) | (count > 0), scaled, x)
        x -= number_of(table_ptr, row, FREQUENCY) * count.to(tl.float32)
        x -= number_of(table_ptr, row, PRESENCE) * (count > 0).to(tl.float32)
    grammar_row = integer_of(table_ptr, row, GRAMMAR).to(tl.int64)
    if grammar_row >= 0:
        words = tl.load(grammar_ptr + grammar_row * grammar_stride + token_ids // 32, mask=inside, other=0)
        x = tl.where(((words >> (token_ids % 32)) & 1) != 0, x, -infinity)
    tl.store(edited_ptr + token_ids, x, mask=inside)
    edits_start = integer_of(table_ptr, row, EDITS_START)
    edits_stop = integer_of(table_ptr, row, EDITS_STOP)
    if edits_start < edits_stop:
        tl.debug_barrier()  # edits change values that other threads of this program stored, and are loaded by others
        first = edits_start
        while first < edits_stop:
            edits = first + tl.arange(0, 128)
            edit_ids = tl.load(edit_ids_ptr + edits, mask=edits < edits_stop, other=-1)
            here = (edit_ids >= start) & (edit_ids < tl.minimum(start + CHUNK, vocab_size))
            values = tl.load(edit_values_ptr + edits, mask=here, other=0.0)
            logits = tl.load(edited_ptr + edit_ids, mask=here, other=0.0)
            tl.store(edited_ptr + edit_ids, logits + values, mask=here)
            first += 128
        tl.debug_barrier()
        x = tl.load(edited_ptr + token_ids, mask=inside, other=-infinity)
    return x


@triton.jit
def shortlist_kernel(
    logits_ptr,
    logits_stride,
    table_ptr,
    edited_ptr,
    stats_ptr,
    group_max_ptr,
    list_len_ptr,  # [S] int32: length of the list; larger than `capacity` if the list is incomplete
    list_values_ptr,  # [S, capacity] float32, in any order
    list_ids_ptr,  # [S, capacity] int32
    bounds_ptr,  # [S] float32, written here: lower bound of the list's values
    capacity,
    vocab_size,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,  # C, rounded up to a power of 2
):
    """Grid (C, S)."""
    infinity = float("inf")
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    num_chunks = tl.num_programs(0)
    num_rows = tl.num_programs(1)
    if integer_of(table_ptr, row, KIND) != FILTERED_DRAW:
        return
    lanes = tl.arange(0, CHUNKS)
    maxima = tl.load(
        figure_at(stats_ptr, BEST, row, num_rows, num_chunks, lanes), mask=lanes < num_chunks, other=-infinity
    )
    sums = tl.load(
        figure_at(stats_ptr, SUM, row, num_rows, num_chunks, lanes), mask=lanes < num_chunks, other=0.0
    )
    largest, total = sum_of_exp(maxima, sums)
    top_k = integer_of(table_ptr, row, TOP_K)
    top_p = number_of(table_ptr, row, TOP_P)
    # min_p applies last: where top_p needs the mass of all tokens that top_k keeps, min_p must not remove any before.
    last = (top_k == 0) | (top_p == 1.0)
    bound = tl.where(last, largest + number_of(table_ptr, row, LOG_MIN_P), -infinity)
    own_max = tl.load(figure_at(stats_ptr, BEST, row, num_rows, num_chunks, chunk))
    if top_k > 0:
        # A group's maximum stands for one token: if the maxima of k groups reach a value, at least k tokens do.
        groups: tl.constexpr = CHUNK // GROUP
        places = tl.arange(0, CHUNKS * groups)
        group_max = tl.load(
            group_max_ptr + row * num_chunks * groups + places,
            mask=places < num_chunks * groups,
            other=-infinity,
        )
        low = tl.min(tl.where(group_max > -infinity, group_max, largest), axis=0)
        high = largest
        found = tl.sum((group_max >= low).to(tl.int32), axis=0) >= top_k
        for _ in range(BOUND_STEPS):
            middle = 0.5 * low + 0.5 * high
            enough = tl.sum((group_max >= middle).to(tl.int32), axis=0) >= top_k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        bound = tl.maximum(bound, tl.where(found, low, -infinity))
    elif top_p < 1.0:
        # All tokens below the bound together have less than the mass that top_p may drop.
        bound = tl.maximum(bound, largest + tl.log(total * (1.0 - top_p) / vocab_size) - BOUND_MARGIN)
    if chunk == 0:
        tl.store(bounds_ptr + row, bound)
    if own_max < bound:
        return
    token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token_ids < vocab_size
    x = scaled_logits(logits_ptr, logits_stride, edited_ptr, table_ptr, row, token_ids, inside, vocab_size)
    keep = inside & (x >= bound)
    first = tl.atomic_add(list_len_ptr + row, tl.sum(keep.to(tl.int32), axis=0))
    places = first + tl.cumsum(keep.to(tl.int32), axis=0) - 1
    keep = keep & (places < capacity)
    tl.store(list_values_ptr + row * capacity + places, x, mask=keep)
    tl.store(list_ids_ptr + row * capacity + places, token_ids, mask=keep)
