"""Logprobs in two launches: normalizer, given tokens and the likeliest ones, without sorting the vocabulary.

Each chunk of a row passes on its k likeliest tokens as integers that order first by logit, then by token id, smaller
ids first; the row's k likeliest tokens are selected from those of all chunks in the same way.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, possibly-undefined"
# Shapes: n rows, V tokens of the vocabulary, C chunks of a row, k likeliest tokens.

from __future__ import annotations

import triton
import triton.language as tl

from .sampler_rows import from_order_key, order_key, sum_of_exp

LAST_ID: tl.constexpr = tl.constexpr(2**31 - 1)
NONE: tl.constexpr = tl.constexpr(-(2**63))  # ranks below every token

# Planes of the statistics [2, n, C].
BEST: tl.constexpr = tl.constexpr(0)
SUM: tl.constexpr = tl.constexpr(1)


@triton.jit(do_not_specialize=["top_k"])
def survey_logprobs_kernel(
    logits_ptr,  # [S, V] float32, or a dtype that is widened to it
    logits_stride,
    indices_ptr,  # [n] int64, row indices into the logits
    stats_ptr,  # [2, n, C] float32, written here
    top_ptr,  # [n, C, k] int64, written here
    top_k,
    vocab_size,
    CHUNK: tl.constexpr,
):
    """Grid (C, n)."""
    infinity = float("inf")
    chunk = tl.program_id(0)
    line = tl.program_id(1).to(tl.int64)
    num_chunks = tl.num_programs(0)
    num_lines = tl.num_programs(1)
    row = tl.load(indices_ptr + line)
    token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token_ids < vocab_size
    x = tl.load(logits_ptr + row * logits_stride + token_ids, mask=inside, other=-infinity).to(tl.float32)
    largest = tl.max(x, axis=0)
    shift = tl.where(largest == -infinity, 0.0, largest)
    tl.store(stats_ptr + (line + BEST * num_lines) * num_chunks + chunk, largest)
    tl.store(stats_ptr + (line + SUM * num_lines) * num_chunks + chunk, tl.sum(tl.exp(x - shift), axis=0))
    ranked = (order_key(x).to(tl.int64) << 32) + (LAST_ID - token_ids)
    ranked = tl.where(inside, ranked, NONE)
    rank = top_k * 0
    while rank < top_k:
        best = tl.max(ranked, axis=0)
        tl.store(top_ptr + (line * num_chunks + chunk) * top_k + rank, best)
        ranked = tl.where(ranked == best, NONE, ranked)
        rank += 1


@triton.jit(do_not_specialize=["top_k"])
def collect_logprobs_kernel(
    logits_ptr,
    logits_stride,
    indices_ptr,
    chosen_ptr,  # [S] int64, the given tokens
    stats_ptr,
    top_ptr,
    token_ptr,  # [n] float32, written here
    top_ids_ptr,  # [n, k] int32, written here
    top_logprobs_ptr,  # [n, k] float32, written here
    top_k,
    num_chunks,
    CHUNKS: tl.constexpr,  # C, rounded up to a power of 2
    CANDIDATES: tl.constexpr,  # at least C * k, a power of 2
):
    """Grid (n,)."""
    line = tl.program_id(0).to(tl.int64)
    num_lines = tl.num_programs(0)
    lanes = tl.arange(0, CHUNKS)
    valid = lanes < num_chunks
    maxima = tl.load(
        stats_ptr + (line + BEST * num_lines) * num_chunks + lanes, mask=valid, other=-float("inf")
    )
    sums = tl.load(stats_ptr + (line + SUM * num_lines) * num_chunks + lanes, mask=valid, other=0.0)
    largest, total = sum_of_exp(maxima, sums)
    normalizer = largest + tl.log(total)
    row = tl.load(indices_ptr + line)
    chosen = tl.load(chosen_ptr + row)
    logit = tl.load(logits_ptr + row * logits_stride + chosen).to(tl.float32)
    tl.store(token_ptr + line, logit - normalizer)
    places = tl.arange(0, CANDIDATES)
    ranked = tl.load(
        top_ptr + line * num_chunks * top_k + places, mask=places < num_chunks * top_k, other=NONE
    )
    rank = top_k * 0
    while rank < top_k:
        best = tl.max(ranked, axis=0)
        tl.store(top_ids_ptr + line * top_k + rank, LAST_ID - (best & 0xFFFFFFFF).to(tl.int32))
        logit = from_order_key((best >> 32).to(tl.int32))
        tl.store(top_logprobs_ptr + line * top_k + rank, logit - normalizer)
        ranked = tl.where(ranked == best, NONE, ranked)
        rank += 1
