"""Weights in floating point that are rounded to blocks of whole numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engine.model_runner.kernels.blocks.block_rounding import round_to_blocks
from engine.model_runner.kernels.quantized_weights import BlockWeight, stack_blocks


def squared_error(weight: Tensor, rounded: Tensor) -> Tensor:
    """Of each block, in float64."""
    return (weight.double() - rounded.double()).view(-1, 32).square().sum(1)


def whole_range(weight: Tensor) -> Tensor:
    """4 bits over the range of each block, without a search."""
    blocks = weight.view(-1, 32)
    low, high = blocks.aminmax(dim=1, keepdim=True)
    scale = (high - low) / 15
    return (((blocks - low) / scale).round() * scale + low).view(weight.shape)


@pytest.fixture
def weight() -> Tensor:
    """More blocks than are rounded at a time, of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    sizes = 10 ** torch.empty(320, 1).uniform_(-3, 2, generator=generator)
    return torch.randn(320, 576, generator=generator) * sizes


def test_8_bits_are_off_by_half_a_step_at_most(weight: Tensor) -> None:
    rounded = round_to_blocks(weight, 8)

    assert (rounded.zero, rounded.minima, rounded.bits) == (128, None, 8)
    assert rounded.shape == weight.shape
    steps = rounded.scales.repeat_interleave(32, dim=1)
    # A scale of 16 bits may be a little too small for the largest number.
    assert ((rounded.dequantized(torch.float32) - weight).abs() <= steps * 0.57).all()
    assert rounded.numbers.min() >= 1  # symmetric


def test_two_blocks_of_8_bits_may_share_a_scale(weight: Tensor) -> None:
    rounded = round_to_blocks(weight, 8, paired_scales=True)

    assert rounded.has_shared_scales(2) and not round_to_blocks(weight, 8).has_shared_scales(2)
    steps = rounded.scales.repeat_interleave(32, dim=1)
    assert ((rounded.dequantized(torch.float32) - weight).abs() <= steps * 0.57).all()
    single = round_to_blocks(weight, 8).scales
    assert torch.equal(rounded.scales[:, ::2], torch.maximum(single[:, ::2], single[:, 1::2]))
    stacked = stack_blocks([rounded, round_to_blocks(weight, 8)])
    assert not stacked.has_shared_scales(2) and torch.equal(stacked.scales[: len(weight)], rounded.scales)
    # 96 inputs are no pairs, and 4 bits need finer scales.
    for odd in (
        round_to_blocks(weight[:, :96], 8, paired_scales=True),
        round_to_blocks(weight, 4, paired_scales=True),
    ):
        assert not odd.has_shared_scales(2)


def test_4_bits_lie_where_the_error_is_small(weight: Tensor) -> None:
    rounded = round_to_blocks(weight, 4)

    assert (rounded.zero, rounded.bits) == (0, 4) and rounded.numbers.max() == 15
    ours = squared_error(weight, rounded.dequantized(torch.float32))
    ranges = squared_error(weight, whole_range(weight))
    assert ours.sqrt().sum() < 0.95 * ranges.sqrt().sum()
    assert (ours <= ranges * 1.05 + 1e-9).all()  # no block is worse, but for the 16 bits of scale and minimum


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_and_minima_have_16_bits(weight: Tensor, bits: int) -> None:
    """Those of half precision, times a power of two that brings the weight into its range."""
    rounded = round_to_blocks(weight, bits)  # type: ignore[arg-type]
    factor = 2.0 ** (14 - math.frexp(float(weight.abs().max()))[1])
    for numbers in (rounded.scales, rounded.minima):
        assert numbers is None or torch.equal(numbers * factor, (numbers * factor).half().float())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("power", [-60, -16, 40])
def test_weights_of_any_size_are_rounded_alike(weight: Tensor, bits: int, power: int) -> None:
    """Scales of numbers around 1e-5 would be hardly more than the smallest half, and cut off a quarter of the range."""
    rounded = round_to_blocks(weight, bits)  # type: ignore[arg-type]

    other = round_to_blocks(weight * 2.0**power, bits)  # type: ignore[arg-type]

    assert torch.equal(other.numbers, rounded.numbers)
    assert torch.equal(other.scales, rounded.scales * 2.0**power)
    if other.minima is not None and rounded.minima is not None:
        assert torch.equal(other.minima, rounded.minima * 2.0**power)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_makes_a_scale_or_minimum_that_is_none(bits: int, value: float) -> None:
    weight = torch.ones(2, 64)
    weight[1, 40] = value

    rounded = round_to_blocks(weight, bits)  # type: ignore[arg-type]

    finite = rounded.scales.isfinite()
    if rounded.minima is not None:
        finite &= rounded.minima.isfinite()
    assert finite.tolist() == [[True, True], [True, False]]


@pytest.mark.parametrize("bits", [4, 8])
def test_several_threads_round_as_one_does_also_in_inference_mode(weight: Tensor, bits: int) -> None:
    expected, before = round_to_blocks(weight, bits), torch.get_num_threads()  # type: ignore[arg-type]
    try:
        torch.set_num_threads(2)
        with torch.inference_mode():
            rounded = round_to_blocks(weight, bits)  # type: ignore[arg-type]
            assert torch.get_num_threads() == 2
            assert torch.equal(rounded.dequantized(torch.float32), expected.dequantized(torch.float32))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bits", [4, 8])
def test_no_rows_are_no_blocks(bits: int) -> None:
    assert round_to_blocks(torch.empty(0, 64), bits).shape == (0, 64)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [0.0, 1.0, -0.25])
def test_blocks_of_equal_numbers_are_exact_and_zero_stays_zero(bits: int, value: float) -> None:
    weight = torch.full((2, 64), value, dtype=torch.bfloat16)

    rounded = round_to_blocks(weight, bits)  # type: ignore[arg-type]

    torch.testing.assert_close(rounded.dequantized(torch.float32), weight.float(), rtol=4e-4, atol=0)


def test_what_already_lies_on_16_steps_is_found() -> None:
    """A file of 4 bits that was turned into floats comes back as it was."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(0, 16, (64, 128), generator=generator, dtype=torch.uint8)
    numbers[:, ::32], numbers[:, 1::32] = 0, 15
    scales, minima = (torch.rand(64, 4, generator=generator).half().float() for _ in range(2))
    stored = BlockWeight(numbers, scales + 0.5, minima - 8, 0, 4)

    again = round_to_blocks(stored.dequantized(torch.float32), 4)

    assert torch.equal(again.numbers, numbers)


def test_parts_of_the_inputs_and_stacks_of_outputs(weight: Tensor) -> None:
    rounded = round_to_blocks(weight, 4)
    whole = rounded.dequantized(torch.float32)

    assert torch.equal(rounded.take_blocks(torch.arange(2, 6)).dequantized(torch.float32), whole[:, 64:192])
    stacked = stack_blocks([rounded, round_to_blocks(weight[:7], 4)])
    assert torch.equal(stacked.dequantized(torch.float32), torch.cat((whole, whole[:7])))
    wide = round_to_blocks(weight, 8)
    mixed = stack_blocks([rounded, wide])
    assert rounded.stacks_with(wide) and mixed.bits == 8
    assert torch.equal(mixed.numbers, torch.cat((rounded.numbers, wide.numbers)))
    assert torch.equal(mixed.dequantized(torch.float32)[: len(whole)], whole)
    torch.testing.assert_close(
        mixed.dequantized(torch.float32)[len(whole) :], wide.dequantized(torch.float32)
    )
    assert not rounded.stacks_with(rounded.take_blocks(torch.arange(1)))
