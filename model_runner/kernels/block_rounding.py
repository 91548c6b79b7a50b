"""`round_to_blocks`: weights in floating point to the nearest `BlockWeight`, block by block.

8 bits are symmetric: the largest number of a block, or of two, decides its scale. 4 bits have a scale and a minimum,
and with 16 steps it matters where they lie: the range of a block is not the best choice, since cutting off its ends a
little makes all steps finer. So a few ranges are tried, for each the scale and minimum are those of least squares, and
the one with the smallest squared error wins (as in k-quants of llama.cpp, without their weighting).

Scales and minima are rounded to 16 bits, in which kernels hold them, before numbers are chosen for them. Half precision
has a narrow range, and blocks of small numbers would get coarse scales, or ones that cut off their ends: so the weight
is multiplied by a power of two first, as kernels do it with scales and minima.
"""

# Shapes: B blocks.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from .quantized_weights import BLOCK_SIZE, BlockWeight

_INT8_ZERO: Final = 128
_INT8_MAX: Final = 127
_INT4_MAX: Final = 15
_STEPS: Final = (14.6, 15.4, 16.2, 17.2)
"""Into how many steps the range of a block is divided, 15 of which are used: more of them cut off more. With these the
error is 7 % below that of whole ranges (normal numbers); with fifteen tries instead of four it would be 7.5 %."""
_BLOCKS_AT_A_TIME: Final = 1 << 12
"""Temporaries of half a megabyte each, or one where blocks share scales: the search reads them many times, and the
cache holds some of them."""
_LARGEST_EXPONENT: Final = 14
"""Weights are multiplied until all are smaller than 2^14, so that the range of a block is smaller than 2^15."""
_LEAST_EXPONENT: Final = -80
"""Weights smaller than 2^-80 are not brought up to there: their scales would be no ordinary float32."""
_SMALLEST_SCALE: Final = 2.0**-24
"""The smallest number of 16 bits: stands for the scale of a block of equal numbers, which would be 0."""


class _Rounded(NamedTuple):
    """Numbers [B, 32], scales and minima [B, 1], squared errors [B, 1]; all in float32."""

    numbers: Tensor
    scales: Tensor
    minima: Tensor
    errors: Tensor


def round_to_blocks(weight: Tensor, bits: Literal[4, 8], *, paired_scales: bool = False) -> BlockWeight:
    """[N, K], in any floating-point type, to whole numbers; K must be a multiple of 32.

    Args:
        paired_scales: two blocks of 8 bits get one scale, which our C++ kernels are faster with, if K allows it.
    """
    rows, columns = weight.shape
    assert columns % BLOCK_SIZE == 0, weight.shape
    blocks_per_scale = 2 if paired_scales and bits == 8 and columns % (2 * BLOCK_SIZE) == 0 else 1
    blocks = weight.contiguous().view(-1, blocks_per_scale * BLOCK_SIZE)
    factor = 2.0 ** (_LARGEST_EXPONENT - _exponent(blocks))
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


def _exponent(blocks: Tensor) -> int:
    """e so that all numbers are smaller than 2^e; 0 where some are not finite, which scales will show."""
    if not blocks.numel():
        return 0
    largest = max(abs(float(end)) for end in blocks.aminmax())
    return max(math.frexp(largest)[1], _LEAST_EXPONENT) if math.isfinite(largest) else 0


def _on_all_threads(work: Callable[[int], None], starts: range) -> None:
    """`work` for each start. Not by torch's own threads: they would meet after each of a hundred short operations, and
    on a busy machine wait for each other thirty times as long as they work.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1 or len(starts) == 1:
        for start in starts:
            work(start)
        return
    inference = torch.is_inference_mode_enabled()

    def work_as_here(
        start: int,
    ) -> None:  # threads begin in the ordinary mode, in which they may not fill our tensors
        with torch.inference_mode(inference):
            work(start)

    try:
        with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for _ in pool.map(work_as_here, starts):
                pass
    finally:
        torch.set_num_threads(num_threads)  # what threads that start later will have


def _to_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers [B, n] and scales [B, 1] of blocks [B, n]."""
    scales = _in_16_bits(values.abs().amax(dim=1, keepdim=True) / _INT8_MAX).clamp_(min=_SMALLEST_SCALE)
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
    """For each way to divide the range: the scale and minimum that fit its numbers best, and the numbers for those."""
    sum_x = values.sum(dim=1, keepdim=True)
    span, middle = (high - low).clamp_(min=_SMALLEST_SCALE), (low + high) / 2
    for steps in _STEPS:
        numbers = (values - middle).mul_(steps / span).add_(_INT4_MAX / 2).round_().clamp_(0, _INT4_MAX)
        sum_q = numbers.sum(dim=1, keepdim=True)
        sum_qq = (numbers * numbers).sum(dim=1, keepdim=True)
        sum_xq = (values * numbers).sum(dim=1, keepdim=True)
        spread = sum_qq * BLOCK_SIZE - sum_q * sum_q  # 0 where all numbers are equal
        scales = (sum_xq * BLOCK_SIZE - sum_x * sum_q) / spread.clamp(min=1.0)
        scales = _in_16_bits(scales).clamp_(min=_SMALLEST_SCALE)
        minima = _in_16_bits((sum_x - scales * sum_q) / BLOCK_SIZE)
        yield _numbers_for(values, scales, minima)


def _numbers_for(values: Tensor, scales: Tensor, minima: Tensor) -> _Rounded:
    """The nearest numbers where scale and minimum are given, and how far they are off."""
    numbers = ((values - minima) / scales).round_().clamp_(0, _INT4_MAX)
    errors = (numbers * scales).add_(minima).sub_(values).square_().sum(dim=1, keepdim=True)
    return _Rounded(numbers, scales, minima, errors)


def _in_16_bits(values: Tensor) -> Tensor:
    return values.to(torch.float16).to(torch.float32)
