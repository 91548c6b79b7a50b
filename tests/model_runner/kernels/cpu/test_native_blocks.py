"""Products with block-quantized weights against float64, over bits, shapes, strides and extremes."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model_runner.kernels.blocks import native_blocks
from engine.model_runner.kernels.blocks.native_blocks import (
    NO_TILES,
    TILES_FROM,
    NativeBlockLinear,
    reasons_against_native_blocks,
)
from engine.model_runner.kernels.cpu.compiler import best_isa
from engine.model_runner.kernels.native import NativeOps
from engine.model_runner.kernels.quantized_weights import BLOCK_SIZE, BlockWeight
from engine.model_runner.recording.programs.arena import Arena
from engine.model_runner.recording.programs.native_program import record

from .conftest import COMPILES, WITHOUT_AMX, library_of

BF16, F32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")
FORMS = [(4, False), (4, True), (8, False), (8, True)]


def block_weight(outputs: int, inputs: int, bits: int, has_minima: bool, seed: int = 0) -> BlockWeight:
    """Random, with scales and minima that half precision holds."""
    random = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 2**bits, (outputs, inputs), generator=random, dtype=torch.uint8)
    shape = (outputs, inputs // BLOCK_SIZE)
    scales = (torch.rand(shape, generator=random) * 0.01 - 0.002).half().float()
    minima = torch.randn(shape, generator=random).mul_(0.02).half().float()
    return BlockWeight(numbers, scales, minima if has_minima else None, 2 ** (bits - 1), bits)


def guarded(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random numbers in the middle of NaN: who reads beside them gets NaN."""
    size = torch.Size(shape).numel()
    memory = torch.full((size + 128,), torch.nan, dtype=BF16)
    part = memory[64 : 64 + size].view(shape)
    part.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
    return part


def paired(weight: BlockWeight) -> BlockWeight:
    """The same numbers, with the scale of each second block for the one before, too."""
    return replace(weight, scales=weight.scales[:, 1::2].repeat_interleave(2, dim=1))


def shared(weight: BlockWeight, num: int) -> BlockWeight:
    """The same numbers, with the first scale and minimum of each `num` blocks for all of them."""
    scales, minima = (
        None if part is None else part[:, ::num].repeat_interleave(num, dim=1)
        for part in (weight.scales, weight.minima)
    )
    assert scales is not None
    return replace(weight, scales=scales, minima=minima)


def quantized(x: torch.Tensor, block_size: int = BLOCK_SIZE) -> torch.Tensor:
    """What the kernel makes of x, in float64."""
    blocks: torch.Tensor = x.float().unflatten(1, (-1, block_size))
    most = blocks.abs().amax(-1, keepdim=True)
    # `127 / most` would be the reciprocal times 127, which is rounded twice.
    numbers = (blocks * torch.where(most > 1e-30, torch.full_like(most, 127) / most, 0)).round()
    return (numbers.double() * (most / 127).double()).flatten(1)


def check(
    linear: NativeBlockLinear, weight: BlockWeight, x: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """Against the product in float64, up to the rounding of float32 sums and of the result."""
    exact_weight = weight.dequantized(torch.float64)
    is_paired = weight.bits == 8 and weight.minima is None and weight.has_shared_scales(2)
    numbers_of_x = quantized(x, 2 * BLOCK_SIZE if is_paired else BLOCK_SIZE)
    exact = numbers_of_x @ exact_weight.T + (0 if bias is None else bias.double())
    # Parts of a sum may be larger than the sum: numbers and minima are added up on their own.
    scales = weight.scales.abs().double() * (weight.factor or 1)
    numbers = weight.numbers.double() * scales.repeat_interleave(weight.shape[1] // scales.shape[1], 1)
    parts = numbers_of_x.abs() @ (numbers + exact_weight.abs()).T + (
        0 if bias is None else bias.double().abs()
    )
    precise = linear.to_float32(x, bias)
    assert precise.dtype == F32
    assert ((precise.double() - exact).abs() <= 4e-6 * parts).all()
    assert torch.equal(linear(x, bias), precise.to(BF16))


@pytest.mark.parametrize(("bits", "has_minima"), FORMS)
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 1), (64, 64), (576, 200), (1536, 33), (96, 97)])
def test_it_is_the_product_for_any_number_of_tokens(library, bits, has_minima, inputs, outputs):
    weight = block_weight(outputs, inputs, bits, has_minima)
    linear = NativeBlockLinear(library, weight, NO_TILES)
    bias = guarded((outputs,), 1) if inputs == 576 else None
    for num_tokens in (0, 1, 2, 5, 6, 7, 8, 9, 61, 130):
        check(linear, weight, guarded((num_tokens, inputs), 2), bias)


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 1), (576, 200), (1536, 33), (192, 97)])
def test_blocks_whose_scales_are_equal_in_pairs_are_added_up_in_pairs(library, inputs, outputs):
    weight = paired(block_weight(outputs, inputs, 8, has_minima=False))
    linear = NativeBlockLinear(library, weight, NO_TILES)
    for num_tokens in (0, 1, 2, 5, 6, 7, 61, 130):
        check(linear, weight, guarded((num_tokens, inputs), 2))
    x = guarded((130, inputs), 2)
    everybody = linear.to_float32(x)
    assert torch.equal(linear.to_float32(x[77:78]), everybody[77:78])
    assert not torch.equal(
        quantized(x), quantized(x, 2 * BLOCK_SIZE)
    )  # else this would not tell the two apart


@pytest.mark.parametrize(("bits", "has_minima"), [(4, False), (4, True), (8, True)])
def test_other_weights_with_such_scales_are_multiplied_as_ever(library, bits, has_minima):
    weight = paired(block_weight(33, 192, bits, has_minima))
    check(NativeBlockLinear(library, weight, NO_TILES), weight, guarded((7, 192), 2))


@pytest.mark.parametrize("kind", ["minima", "zero", "table"])
@pytest.mark.parametrize(
    ("num", "inputs", "outputs"), [(2, 64, 1), (2, 256, 33), (2, 576, 200), (4, 128, 33), (4, 768, 97)]
)
def test_blocks_of_4_bits_share_scales_in_the_packed_weight(library, kind, num, inputs, outputs):
    weight = shared(block_weight(outputs, inputs, 4, kind == "minima"), num)
    if kind == "table":
        weight = replace(weight, zero=123, table=(*range(0, 255, 17), 250))
    linear = NativeBlockLinear(library, weight, NO_TILES)
    assert weight.scale_len == num * BLOCK_SIZE
    rows = -(-outputs // 32) * 32
    assert linear.num_bytes == rows * inputs // 2 + rows * (inputs // 32 // num) * (
        4 if kind == "minima" else 2
    )
    for num_tokens in (0, 1, 2, 5, 6, 7, 61, 130):
        check(linear, weight, guarded((num_tokens, inputs), 2))
    expected = weight.dequantized(torch.float32)
    torch.testing.assert_close(linear.rows(torch.arange(outputs)).float(), expected, rtol=2**-8, atol=1e-6)
    tiled = NativeBlockLinear(library, weight, tiles_from=2)
    x = guarded((67, inputs), 3)
    torch.testing.assert_close(
        tiled.to_float32(x), x.float() @ expected.T, rtol=0.05, atol=0.05 * inputs**0.5
    )


@pytest.mark.parametrize("num", [2, 4])
@pytest.mark.parametrize("has_minima", [False, True])
@pytest.mark.parametrize("tiles_from", [2, NO_TILES])
def test_a_gated_product_of_shared_scales(library, num, has_minima, tiles_from):
    weight = shared(block_weight(160, 256, 4, has_minima), num)
    linear, fused = (NativeBlockLinear(library, weight, tiles_from) for _ in range(2))
    assert fused.fuse_silu_and_mul()
    for num_tokens in (1, 6, 33, 61):
        x = guarded((num_tokens, 256), 2)
        assert torch.equal(fused(x), NativeOps(library).silu_and_mul(linear(x)))
    ids = torch.arange(160)
    assert torch.equal(fused.rows(ids), linear.rows(ids))


@pytest.mark.parametrize(("bits", "has_minima"), FORMS)
@pytest.mark.parametrize("tiles_from", [2, NO_TILES])
def test_a_gated_product_has_the_bits_of_a_product_and_its_activation(library, bits, has_minima, tiles_from):
    for width, inputs in ((16, 96), (80, 96), (80, 192)):
        weight, bias = block_weight(2 * width, inputs, bits, has_minima), guarded((2 * width,), 1)
        weight = paired(weight) if inputs == 192 else weight
        linear = NativeBlockLinear(library, weight, tiles_from)
        fused = NativeBlockLinear(library, weight, tiles_from)
        assert fused.fuse_silu_and_mul()
        for num_tokens in (0, 1, 2, 5, 6, 7, 33, 61, 130):
            x = guarded((num_tokens, inputs), 2)
            for added in (None, bias):
                assert torch.equal(fused(x, added), NativeOps(library).silu_and_mul(linear(x, added)))
        ids = torch.arange(2 * width)
        assert torch.equal(fused.rows(ids), linear.rows(ids))


@pytest.mark.parametrize(("bits", "has_minima"), FORMS)
def test_a_token_gets_the_same_bits_in_every_batch(library, bits, has_minima):
    linear = NativeBlockLinear(library, block_weight(97, 192, bits, has_minima), NO_TILES)
    x = guarded((300, 192), 1)
    everybody = linear.to_float32(x)
    for num_tokens in (1, 2, 3, 6, 7, 8, 9, 50, 64, 121):
        assert torch.equal(linear.to_float32(x[100 : 100 + num_tokens]), everybody[100 : 100 + num_tokens])


@pytest.mark.parametrize(("bits", "has_minima"), FORMS)
def test_bits_do_not_depend_on_the_number_of_threads(best_library, bits, has_minima):
    linear = NativeBlockLinear(best_library, block_weight(1000, 576, bits, has_minima))
    before = torch.get_num_threads()
    outs = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            outs.append([linear(guarded((n, 576), 1)) for n in (1, 9, 200)])
    finally:
        torch.set_num_threads(before)
    for one, two, three in zip(*outs, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    bits=st.sampled_from([4, 8]),
    has_minima=st.booleans(),
    outputs=st.integers(1, 80),
    blocks=st.integers(1, 5),
    num_tokens=st.integers(0, 20),
    offset=st.integers(0, 33),
    scale=st.sampled_from([2.0**-60, 2.0**-20, 1.0, 2.0**60]),
    magnitude=st.sampled_from([2.0**-50, 1.0, 2.0**50]),
)
def test_any_shape_stride_and_scale(
    request, bits, has_minima, outputs, blocks, num_tokens, offset, scale, magnitude
):
    library = request.getfixturevalue("best_library")
    weight = block_weight(outputs, blocks * BLOCK_SIZE, bits, has_minima)
    weight = replace(
        weight, scales=weight.scales * scale, minima=None if weight.minima is None else weight.minima * scale
    )
    wide = guarded((num_tokens, offset + blocks * BLOCK_SIZE + 3), 1) * magnitude
    check(NativeBlockLinear(library, weight), weight, wide[:, offset : offset + blocks * BLOCK_SIZE])


# ---------------------------------------------------------------- tiles


@pytest.fixture(params=["instructions", pytest.param("emulated", marks=COMPILES)])
def tiles(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """Kernels with tiles: AMX where this CPU has it, and what stands for it everywhere."""
    if request.param == "emulated":
        return library_of(WITHOUT_AMX, "-DEMULATE_AMX")
    if best_isa() != "amx":
        pytest.skip("AMX cannot run here")
    return library_of("amx")


def check_tiles(
    linear: NativeBlockLinear, weight: BlockWeight, x: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """Against float64: x is not rounded, weights are to bfloat16, into memory that held NaN before."""
    exact_weight = weight.dequantized(torch.float64)
    exact = x.double() @ exact_weight.T + (0 if bias is None else bias.double())
    numbers = weight.numbers.double() * weight.scales.abs().repeat_interleave(BLOCK_SIZE, 1).double()
    sizes = x.double().abs()
    bound = sizes @ exact_weight.abs().T * 2**-8.99 + sizes @ numbers.T * 4e-6 + exact.abs() * 1e-6
    outs = []
    for dtype in (F32, BF16):
        out = torch.full((len(x), weight.shape[0]), torch.nan, dtype=dtype)
        linear._multiply(x, bias, out)
        outs.append(out)
    assert ((outs[0].double() - exact).abs() <= bound).all()
    assert torch.equal(outs[1], outs[0].to(BF16))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("bits", "has_minima"), FORMS)
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(32, 1), (64, 64), (576, 200), (1536, 33), (96, 97), (4192, 40)]
)
def test_tiles_give_the_product_for_any_number_of_tokens(tiles, bits, has_minima, inputs, outputs):
    weight = block_weight(outputs, inputs, bits, has_minima)
    linear = NativeBlockLinear(tiles, weight, 1)
    bias = guarded((outputs,), 1) if inputs == 576 else None
    for num_tokens in (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 130):
        check_tiles(linear, weight, guarded((num_tokens, inputs), 2), bias)


@pytest.mark.parametrize(("bits", "has_minima"), FORMS)
def test_tiles_round_weights_to_the_nearest(tiles, bits, has_minima):
    """Each alone, so that no sum hides it."""
    weight = block_weight(48, 64, bits, has_minima)
    found = NativeBlockLinear(tiles, weight, 1)(torch.eye(64, dtype=BF16)).T.double()
    exact = weight.dequantized(torch.float64)
    half_a_step = torch.ldexp(torch.ones_like(exact), exact.frexp().exponent - 9)
    numbers = weight.numbers.double() * weight.scales.abs().repeat_interleave(BLOCK_SIZE, 1).double()
    assert ((found - exact).abs() <= half_a_step + 2**-20 * numbers).all()


def test_weights_of_large_and_small_scales_in_tiles(tiles):
    for scale in (2.0**-60, 2.0**60):
        weight = block_weight(33, 96, 4, True)
        assert weight.minima is not None
        weight = replace(weight, scales=weight.scales * scale, minima=weight.minima * scale)
        wide = guarded((40, 35 + 96), 1)
        check_tiles(NativeBlockLinear(tiles, weight), weight, wide[:, 17 : 17 + 96])


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(("bits", "has_minima"), FORMS)
def test_with_tiles_bits_depend_on_whether_there_are_many_tokens_alone(tiles, bits, has_minima):
    weight = block_weight(97, 192, bits, has_minima)
    linear, never = NativeBlockLinear(tiles, weight), NativeBlockLinear(tiles, weight, NO_TILES)
    x = guarded((3000, 192), 1)
    many, few = linear.to_float32(x), never.to_float32(x)
    assert not torch.equal(many, few)
    for num_tokens in (1, 8, TILES_FROM - 1, TILES_FROM, TILES_FROM + 1, 64, 65, 121, 1500):
        part = slice(100, 100 + num_tokens)
        assert torch.equal(linear.to_float32(x[part]), (many if num_tokens >= TILES_FROM else few)[part])
        assert torch.equal(never.to_float32(x[part]), few[part])


def test_without_tiles_many_tokens_change_nothing(library_without_tiles):
    weight = block_weight(64, 192, 4, True)
    x = guarded((100, 192), 1)
    expected = NativeBlockLinear(library_without_tiles, weight, NO_TILES).to_float32(x)
    assert torch.equal(NativeBlockLinear(library_without_tiles, weight, 1).to_float32(x), expected)


@pytest.fixture
def library_without_tiles() -> ctypes.CDLL:
    return library_of(WITHOUT_AMX)


@pytest.mark.fast_cases(1)
def test_tiles_of_several_threads_and_of_a_recording(tiles):
    before = torch.get_num_threads()
    weight = block_weight(1000, 576, 4, True)
    linear = NativeBlockLinear(tiles, weight)
    outs: list[Any] = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            outs.append([linear(guarded((n, 576), 1)) for n in (TILES_FROM, 64, 200)])
            for n, expected in zip((TILES_FROM, 64, 200), outs[0], strict=True):
                x = guarded((n, 576), 1)
                recorded = record(tiles, Arena(), partial(linear, x))
                assert recorded.program is not None, recorded.reason_against
                recorded.result.fill_(torch.nan)
                recorded.program.run()
                assert torch.equal(recorded.result, expected)
    finally:
        torch.set_num_threads(before)
    for one, two, three in zip(*outs, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)


def test_numbers_that_are_not_finite_stay_in_their_row_of_tiles(tiles):
    weight = block_weight(40, 64, 4, True)
    linear = NativeBlockLinear(tiles, weight)
    x = guarded((TILES_FROM + 1, 64), 1)
    expected = linear(x)
    x[3, 5], x[20, 63] = torch.inf, torch.nan
    out = linear(x)
    others = [n for n in range(len(x)) if n not in (3, 20)]
    assert torch.equal(out[others], expected[others])
    assert not out[3].isfinite().any() and out[20].isnan().all()


# ---------------------------------------------------------------- edges


def test_whole_numbers_at_the_ends_do_not_overflow(library):
    for number, x in ((255, 1.0), (255, -1.0), (0, 1.0)):
        weight = block_weight(32, 64, 8, False)
        weight = replace(weight, numbers=torch.full_like(weight.numbers, number))
        check(NativeBlockLinear(library, weight), weight, torch.full((3, 64), x, dtype=BF16))


@pytest.mark.parametrize("is_paired", [False, True])
def test_zeros_tiny_and_unbounded_numbers(library, is_paired):
    weight = paired(block_weight(40, 64, 8, False)) if is_paired else block_weight(40, 64, 4, True)
    linear = NativeBlockLinear(library, weight)
    x = torch.zeros(5, 64, dtype=BF16)
    assert not linear(x).any()
    x[0, 3], x[1, 40], x[2, 0], x[3, 63], x[4, 3] = torch.inf, torch.nan, 2.0**-130, 3e38, torch.nan
    x[4, 40] = 1.0  # the other block's largest number does not hide it
    out = linear(x)
    assert not out[0].isfinite().any() and out[1].isnan().all() and out[4].isnan().all()
    assert out[2].abs().max() < 1e-30
    check(linear, weight, x[3:4] * 2.0**-8)
    no_scales = torch.zeros_like(weight.scales)
    nothing = replace(weight, scales=no_scales, minima=None if is_paired else no_scales)
    assert not NativeBlockLinear(library, nothing)(guarded((2, 64), 1)).any()


def test_scales_of_very_different_sizes_keep_their_bits(best_library):
    """As half precision would not hold them itself."""
    weight = block_weight(32, 64, 8, False)
    weight.scales[0] = 2.0**-30
    weight.scales[1] = 2.0**-8 * 1.5
    check(NativeBlockLinear(best_library, weight), weight, guarded((3, 64), 1))


def test_scales_are_rounded_to_half_precision(best_library):
    weight = replace(block_weight(32, 64, 4, True), scales=torch.rand(32, 2) * 0.01)
    x = guarded((5, 64), 1)
    exact = quantized(x) @ weight.dequantized(torch.float64).T
    bound = quantized(x).abs() @ (weight.numbers * weight.scales.repeat_interleave(32, 1)).double().T
    difference = (NativeBlockLinear(best_library, weight).to_float32(x).double() - exact).abs()
    assert difference.max() > 0 and (difference <= 2**-11 * bound + 1e-5).all()


@pytest.mark.parametrize(("bits", "has_minima"), FORMS)
def test_rows_are_the_weight_s(library, bits, has_minima):
    weight = block_weight(97, 96, bits, has_minima)
    linear = NativeBlockLinear(library, weight)
    for ids in ([], [96], [*range(97), 0]):
        rows = linear.rows(torch.tensor(ids, dtype=torch.int64))
        exact = weight.dequantized(torch.float64)[ids]
        assert rows.dtype == BF16 and rows.shape == exact.shape
        assert ((rows.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-7).all()
        scaled = linear.rows(torch.tensor(ids, dtype=torch.int64), 25.25)
        assert torch.equal(scaled, (rows.float() * 25.25).to(BF16))


def test_it_holds_what_the_weight_says_it_would(best_library):
    weight = block_weight(96, 576, 4, True)
    assert NativeBlockLinear(best_library, weight).num_bytes == weight.num_bytes


def test_what_would_read_foreign_memory_is_refused(best_library):
    weight = block_weight(16, 64, 4, True)
    linear = NativeBlockLinear(best_library, weight)
    x = guarded((2, 64), 1)
    for call in (
        lambda: NativeBlockLinear(best_library, replace(weight, numbers=weight.numbers[:, :48])),
        lambda: NativeBlockLinear(best_library, replace(weight, scales=weight.scales[:, :1])),
        lambda: NativeBlockLinear(best_library, replace(weight, scales=weight.scales.half())),
        lambda: NativeBlockLinear(best_library, replace(weight, bits=5)),
        lambda: linear(x.float()),
        lambda: linear(x[:, :32]),
        lambda: linear(x, torch.ones(16)),
        lambda: linear.rows(torch.ones(2)),
    ):
        with pytest.raises(AssertionError):
            call()


def test_reasons_name_what_is_wrong(monkeypatch):
    assert reasons_against_native_blocks(torch.device("meta"), BF16, (64, 64)) == [
        "runs on CPUs only, not on meta"
    ]
    monkeypatch.setattr(native_blocks, "reasons_against_library", lambda: ["no compiler"])
    reasons = reasons_against_native_blocks(CPU, F32, (64, 48))
    assert (
        len(reasons) == 3 and "float32" in reasons[0] and "48" in reasons[1] and reasons[2] == "no compiler"
    )
    monkeypatch.setattr(native_blocks, "reasons_against_library", list)

    class WithoutBytes:
        def blocks_are_fast(self) -> int:
            return 0

    monkeypatch.setattr(native_blocks, "load_library", WithoutBytes)
    assert "AVX2" in reasons_against_native_blocks(CPU, BF16, (64, 64))[0]
