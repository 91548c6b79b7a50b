"""Arithmetic of the sampler's kernels: position-keyed noise, and an order of floats as integers.

All results for a row are independent of the rest of the batch and of the order in which its tokens are processed.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, possibly-undefined"
# Triton kernels have no type annotations for their arguments.

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
