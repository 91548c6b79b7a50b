"""`round_to_blocks`: quantize floating-point weights to the nearest `BlockWeight`, block by block.

8-bit blocks are symmetric: the largest absolute value of a block, or of two blocks, determines the scale. 4-bit blocks
have a scale and a minimum. With only 16 levels the full range of a block is not the best choice: clipping both ends a
little makes all steps finer. The search therefore tries a few ranges. For each range it fits scale and minimum by least
squares; the range with the smallest squared error is taken (as in the k-quants of llama.cpp, without their weighting).

Scales and minima are rounded to 16 bits, the precision that kernels store, before the integers are chosen for them.
Half precision has a narrow range: blocks of small values would get coarse scales, or scales that clip them. The weight
is therefore first multiplied by a power of two, as kernels do with scales and minima.
"""

# Shapes: B blocks.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from ..quantized_weights import BLOCK_SIZE, BlockWeight

_INT8_ZERO: Final = 128
_INT8_MAX: Final = 127
_INT4_MAX: Final = 15
_STEPS: Final = (14.6, 15.4, 16.2, 17.2)
"""Candidates: steps into which the range of a block is divided; 15 of them are used, so a larger number clips more.
With these four candidates the error is 7 % below that of full ranges (normally distributed values); fifteen candidates
would reach 7.5 %."""
_BLOCKS_AT_A_TIME: Final = 1 << 12
"""Blocks per task: its temporaries have half a megabyte each, or one megabyte where blocks share scales. The search
reads them many times; the cache holds several of them."""
_LARGEST_EXPONENT: Final = 14
"""Weights are scaled so that all values are smaller than 2^14; the range of a block is then smaller than 2^15."""
_LEAST_EXPONENT: Final = -80
"""Lower bound of the exponent: weights smaller than 2^-80 are not scaled up to 2^14, because their scales would be
denormal in float32."""
_SMALLEST_SCALE: Final = 2.0**-24
"""The smallest positive float16: replaces the scale of a block of equal values, which would be 0."""


class _Rounded(NamedTuple):
    """Integers [B, 32], scales and minima [B, 1], squared errors [B, 1]; all in float32."""

    numbers: Tensor
    scales: Tensor
    minima: Tensor
    errors: Tensor


def round_to_blocks(weight: Tensor, bits: Literal[4, 8], *, paired_scales: bool = False) -> BlockWeight:
    """Quantize [N, K], any floating-point dtype; K must be a multiple of 32.

    Args:
        paired_scales: two neighboring 8-bit blocks get one scale, if K allows it; the C++ kernels are faster with that.
    """
    rows, columns = weight.shape
    assert columns % BLOCK_SIZE == 0, weight.shape
    blocks_per_scale = 2 if paired_scales and bits == 8 and columns % (2 * BLOCK_SIZE) == 0 else 1
    blocks = weight.contiguous().view(-1, blocks_per_scale * BLOCK_SIZE)
    factor = factor_for(max(abs(float(end)) for end in blocks.aminmax()) if blocks.numel() else 0.0)
    numbers = torch.empty(blocks.shape, dtype=torch.uint8)
    scales = torch.empty((len(blocks), 1), dtype=torch.float32)
    minima = torch.empty_like(scales) if bits == 4 else None

    def round_from(start: int) -> None:
        chunk = slice(start, start + _BLOCKS_AT_A_TIME)
        values = blocks[chunk].to(torch.float32) * factor
        if minima is None:
            numbers[chunk], scales[chunk] = _to_int8(values)
        else:
            best = _to_int4(values)
            numbers[chunk], scales[chunk], minima[chunk] = best.numbers, best.scales, best.minima

    _on_all_threads(round_from, range(0, len(blocks), _BLOCKS_AT_A_TIME))
    scales /= factor
    if minima is not None:
        minima /= factor
    per_row = (rows, columns // BLOCK_SIZE)
    return BlockWeight(
        numbers.view(rows, columns),
        scales.repeat_interleave(blocks_per_scale, dim=0).view(per_row),
        None if minima is None else minima.view(per_row),
        _INT8_ZERO if bits == 8 else 0,
        bits,
    )


def factor_for(largest: float) -> float:
    """The power of two that a weight is multiplied by first; `largest`: the largest of its absolute values.

    2^14 if that is not finite (the scales then show it).
    """
    exponent = max(math.frexp(largest)[1], _LEAST_EXPONENT) if math.isfinite(largest) else 0
    return 2.0 ** (_LARGEST_EXPONENT - exponent)


def int8_scales(largest: Tensor) -> Tensor:
    """Scales of 8-bit blocks from their largest absolute values, which are multiplied by `factor_for`."""
    return _in_16_bits(largest / _INT8_MAX).clamp_(min=_SMALLEST_SCALE)


def _on_all_threads(work: Callable[[int], None], starts: range) -> None:
    """Call `work` once per start, on Python threads. torch's own threads would synchronize after each of a hundred
    short operations; on a busy machine they wait for each other thirty times as long as they compute.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1 or len(starts) == 1:
        for start in starts:
            work(start)
        return
    inference = torch.is_inference_mode_enabled()

    def work_as_here(
        start: int,
    ) -> None:  # new threads start outside inference mode, in which they may not write to inference tensors
        with torch.inference_mode(inference):
            work(start)

    try:
        with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for _ in pool.map(work_as_here, starts):
                pass
    finally:
        torch.set_num_threads(num_threads)  # the default of threads that start later


def _to_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Integers [B, n] and scales [B, 1] of blocks [B, n]."""
    scales = int8_scales(values.abs().amax(dim=1, keepdim=True))
    numbers = (values / scales).round_().clamp_(-_INT8_MAX, _INT8_MAX).add_(_INT8_ZERO)
    return numbers, scales


def _to_int4(values: Tensor) -> _Rounded:
    low, high = values.aminmax(dim=1, keepdim=True)
    scales = _in_16_bits((high - low) / _INT4_MAX).clamp_(min=_SMALLEST_SCALE)
    best = _numbers_for(values, scales, _in_16_bits(low))
    for candidate in _fitted(values, low, high):
        is_better = candidate.errors < best.errors
        best = _Rounded(*(torch.where(is_better, *two) for two in zip(candidate, best, strict=True)))
    return best


def _fitted(values: Tensor, low: Tensor, high: Tensor) -> Iterator[_Rounded]:
    """For each candidate range: the least-squares scale and minimum, and the integers quantized with them."""
    sum_x = values.sum(dim=1, keepdim=True)
    span, middle = (high - low).clamp_(min=_SMALLEST_SCALE), (low + high) / 2
    for steps in _STEPS:
        numbers = (values - middle).mul_(steps / span).add_(_INT4_MAX / 2).round_().clamp_(0, _INT4_MAX)
        sum_q = numbers.sum(dim=1, keepdim=True)
        sum_qq = (numbers * numbers).sum(dim=1, keepdim=True)
        sum_xq = (values * numbers).sum(dim=1, keepdim=True)
        spread = sum_qq * BLOCK_SIZE - sum_q * sum_q  # 0 where all integers are equal
        scales = (sum_xq * BLOCK_SIZE - sum_x * sum_q) / spread.clamp(min=1.0)
        scales = _in_16_bits(scales).clamp_(min=_SMALLEST_SCALE)
        minima = _in_16_bits((sum_x - scales * sum_q) / BLOCK_SIZE)
        yield _numbers_for(values, scales, minima)


def _numbers_for(values: Tensor, scales: Tensor, minima: Tensor) -> _Rounded:
    """The nearest integers for a given scale and minimum, and their squared error."""
    numbers = ((values - minima) / scales).round_().clamp_(0, _INT4_MAX)
    errors = (numbers * scales).add_(minima).sub_(values).square_().sum(dim=1, keepdim=True)
    return _Rounded(numbers, scales, minima, errors)


def _in_16_bits(values: Tensor) -> Tensor:
    return values.to(torch.float16).to(torch.float32)
