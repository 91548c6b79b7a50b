"""Memory layout and arithmetic shared by the stages of `sampler`.

`triton_backend` writes the parameter table: the sampling parameters of each row in 16 words, so one batch may mix all
modes. Beside it are statistics per chunk, processed logits, and the noise.
"""

# Shapes: S rows, V tokens of the vocabulary, C chunks of a row.

# mypy: disable-error-code="no-untyped-def, untyped-decorator, possibly-undefined"

from __future__ import annotations

import triton
import triton.language as tl

UNIT: tl.constexpr = tl.constexpr(2.0**-31 * (1 - 2.0**-23))  # as in `noise`


@triton.jit
def gumbel(token_ids, key_0, key_1):
    """The noise of `noise.gumbel_noise` for int32 tokens: the same 31 bits, with the logarithms of this device."""
    x = token_ids.to(tl.uint32, bitcast=True) * 0x9E3779B1
    x = x ^ key_0.to(tl.uint32, bitcast=True)
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = (x + key_1.to(tl.uint32, bitcast=True)) * 0x846CA68B
    x = x ^ (x >> 16)
    uniform = ((x & 0x7FFFFFFF).to(tl.float32) + 0.5) * UNIT
    # -log1p(-u) without a log1p: the factor corrects the rounding of 1 - u, exactly so near u = 0.
    rest = 1.0 - uniform
    exponential = tl.where(rest == 1.0, uniform, -tl.log(rest) * tl.div_rn(uniform, 1.0 - rest))
    return -tl.log(exponential)


@triton.jit
def order_key(x):
    """float32 -> int32 in the same order; both zeros map to one key."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_order_key(key):
    """The float32 of an `order_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def sum_of_exp(maxima, sums):
    """Max of all parts and sum of exp(x - max), from the same values of each part; parts without a finite max are
    ignored.
    """
    largest = tl.max(maxima, axis=0)
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    return largest, tl.sum(sums * tl.exp(maxima - shift), axis=0)


# A row of the table: 16 words, float32 unless noted. `triton_backend` writes it.
KIND: tl.constexpr = tl.constexpr(0)  # int32, one of the three below
TEMPERATURE: tl.constexpr = tl.constexpr(1)
KEY_0: tl.constexpr = tl.constexpr(2)  # int32, key of the noise
KEY_1: tl.constexpr = tl.constexpr(3)
TOP_K: tl.constexpr = tl.constexpr(4)  # int32, 0 for none
TOP_P: tl.constexpr = tl.constexpr(5)  # 1 for none
LOG_MIN_P: tl.constexpr = tl.constexpr(6)  # -inf for none
EDITED: tl.constexpr = tl.constexpr(7)  # int32, row of `edited`, -1 for none
SLOT: tl.constexpr = tl.constexpr(8)  # int32, row of the token counts, -1 without penalties
REPETITION: tl.constexpr = tl.constexpr(9)
FREQUENCY: tl.constexpr = tl.constexpr(10)
PRESENCE: tl.constexpr = tl.constexpr(11)
EDITS_START: tl.constexpr = tl.constexpr(12)  # int32, first of the row's edits
EDITS_STOP: tl.constexpr = tl.constexpr(13)
GRAMMAR: tl.constexpr = tl.constexpr(14)  # int32, row of the bit masks, -1 for none
WIDTH: tl.constexpr = tl.constexpr(16)

GREEDY: tl.constexpr = tl.constexpr(0)
DRAW: tl.constexpr = tl.constexpr(1)
FILTERED_DRAW: tl.constexpr = tl.constexpr(2)

# Planes of the statistics [4, S, C].
BEST: tl.constexpr = tl.constexpr(0)
BEST_ID: tl.constexpr = tl.constexpr(1)  # int32
SUM: tl.constexpr = tl.constexpr(2)  # sum of exp(x - best); filtered rows only
BAD: tl.constexpr = tl.constexpr(3)  # 1.0 if a logit of the model is NaN or infinite


@triton.jit
def integer_of(table_ptr, row, column):
    """An int32 word of the row's table entry."""
    return tl.load(table_ptr + row * WIDTH + column)


@triton.jit
def number_of(table_ptr, row, column):
    """A float32 word of the row's table entry."""
    return tl.load(table_ptr + row * WIDTH + column).to(tl.float32, bitcast=True)


@triton.jit
def figure_at(stats_ptr, plane, row, num_rows, num_chunks, chunk):
    """Address of a statistic of one chunk, or of several; `row` is int64, so the offset does not overflow."""
    return stats_ptr + (row + plane * num_rows) * num_chunks + chunk


@triton.jit
def scaled_logits(logits_ptr, logits_stride, edited_ptr, table_ptr, row, token_ids, inside, vocab_size):
    """Processed logits divided by the temperature; -inf outside."""
    infinity = float("inf")
    edited_row = integer_of(table_ptr, row, EDITED)
    own = inside & (edited_row < 0)
    x = tl.load(logits_ptr + row * logits_stride + token_ids, mask=own, other=-infinity).to(tl.float32)
    other = inside & (edited_row >= 0)
    address = edited_ptr + tl.maximum(edited_row, 0).to(tl.int64) * vocab_size + token_ids
    x = tl.where(edited_row < 0, x, tl.load(address, mask=other, other=-infinity))
    return tl.div_rn(x, number_of(table_ptr, row, TEMPERATURE))
