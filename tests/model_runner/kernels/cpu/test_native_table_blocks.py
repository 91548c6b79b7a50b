"""Products with 4-bit codes of a table (IQ4_NL, MXFP4, NVFP4) against float64 and the reference of the format."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

from engine.model_runner.kernels.blocks.native_blocks import NO_TILES, TILES_FROM, NativeBlockLinear
from engine.model_runner.kernels.blocks.tensor_rows import block_weight as read_blocks
from engine.model_runner.kernels.native import NativeOps
from engine.model_runner.kernels.native_experts import NativeExperts
from engine.model_runner.kernels.quantized_weights import (
    BLOCK_SIZE,
    BlockWeight,
    NotFiniteError,
    stack_blocks,
)
from engine.model_runner.recording.programs.arena import Arena
from engine.model_runner.recording.programs.native_program import record
from engine.models.spec.quantization import IQ4, MXFP4, NVFP4, BlockForm
from tests.models.gguf.test_ggml_types import by_name, random_blocks

from .test_native_blocks import block_weight, check, guarded, tiles  # noqa: F401
from .test_native_experts import routed

BF16 = torch.bfloat16
ENDS = BlockForm(
    4, 127, has_minima=False, table=(0, 254, 0, 254, 1, 253, 127, 128, 0, 254, 0, 254, 0, 254, 0, 254)
)
"""Values as far from zero as they may be."""
FORMS = {
    "IQ4": IQ4,
    "MXFP4": MXFP4,
    "NVFP4": NVFP4,
    "ends": ENDS,
    "ends, halves": ENDS._replace(scale_len=16),
}
SHAPES = [(32, 1), (64, 64), (576, 200), (1536, 33), (96, 97)]


def table_weight(form: BlockForm, outputs: int, inputs: int, seed: int = 0) -> BlockWeight:
    """Random; scales of 16 inputs have all values of e4m3, and a factor that is no power of two."""
    weight = block_weight(outputs, inputs, 4, False, seed)
    scales, factor = weight.scales, None
    if form.scale_len < BLOCK_SIZE:
        random = torch.Generator().manual_seed(seed)
        codes = torch.randint(
            0, 256, (outputs, inputs // form.scale_len), generator=random, dtype=torch.uint8
        )
        scales, factor = codes.view(torch.float8_e4m3fn).float().nan_to_num_(1.0), 0.0123
    return BlockWeight(weight.numbers, scales, None, form.zero, 4, form.table, factor)


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> BlockForm:
    return FORMS[request.param]


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_it_is_the_product_for_any_number_of_tokens(library, form, inputs, outputs):
    weight = table_weight(form, outputs, inputs)
    linear = NativeBlockLinear(library, weight, NO_TILES)
    bias = guarded((outputs,), 1) if inputs == 576 else None
    for num_tokens in (0, 1, 2, 5, 6, 7, 8, 9, 61, 130):
        check(linear, weight, guarded((num_tokens, inputs), 2), bias)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("x", [1.0, -1.0])
def test_values_at_the_ends_do_not_overflow(library, form, number, x):
    """All products of a block have the same sign and are as large as they can be."""
    assert form.table is not None
    at = int(np.argmax(form.table) if number else np.argmin(form.table))
    weight = table_weight(form, 32, 64)
    weight = replace(weight, numbers=torch.full_like(weight.numbers, at))
    check(NativeBlockLinear(library, weight), weight, torch.full((3, 64), x, dtype=BF16))


@pytest.mark.parametrize("kind", ["IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"])
def test_products_are_those_of_the_reference_s_weights(library, kind):
    """x is whole numbers up to 127 in each block, which 8 bits hold, so that only float32 sums are rounded."""
    raw = random_blocks(kind, 40 * 512 // by_name(kind).block_len).reshape(40, -1)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])).double()
    weight = read_blocks(raw, by_name(kind))
    assert weight.bits == 4
    linear = NativeBlockLinear(library, weight, NO_TILES)
    random = torch.Generator().manual_seed(0)
    for num_tokens in (1, 4, 9):
        x = torch.randint(-127, 128, (num_tokens, 512), generator=random).to(BF16)
        x[:, ::BLOCK_SIZE] = 127
        found = linear.to_float32(x).double()
        # IQ4_XS has scales of 17 bits, which the kernel rounds to 11.
        bound = x.abs().double() @ expected.abs().T * (2**-11 if kind == "IQ4_XS" else 1e-6)
        assert ((found - x.double() @ expected.T).abs() <= bound).all()
    rows = linear.rows(torch.arange(40)).double()
    close = {"IQ4_NL": 2**-8, "IQ4_XS": 2**-7.8, "MXFP4": 0, "NVFP4": 0}[kind]  # bfloat16 holds their weights
    assert ((rows - expected).abs() <= expected.abs() * close).all()


def test_a_gated_product_has_the_bits_of_a_product_and_its_activation(library, form):
    for tiles_from in (2, NO_TILES):
        weight, bias = table_weight(form, 160, 192), guarded((160,), 1)
        linear = NativeBlockLinear(library, weight, tiles_from)
        fused = NativeBlockLinear(library, weight, tiles_from)
        assert fused.fuse_silu_and_mul()
        for num_tokens in (1, 5, 33, 61):
            x = guarded((num_tokens, 192), 2)
            assert torch.equal(fused(x, bias), NativeOps(library).silu_and_mul(linear(x, bias)))
        assert torch.equal(fused.rows(torch.arange(160)), linear.rows(torch.arange(160)))


def test_a_token_gets_the_same_bits_in_every_batch(library, form):
    linear = NativeBlockLinear(library, table_weight(form, 97, 192), NO_TILES)
    x = guarded((130, 192), 1)
    together = linear.to_float32(x)
    for num_tokens in (1, 2, 3, 6, 7, 50, 64):
        assert torch.equal(linear.to_float32(x[30 : 30 + num_tokens]), together[30 : 30 + num_tokens])


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_tiles_give_the_product_with_rounded_weights(tiles: ctypes.CDLL, form, inputs, outputs):  # noqa: F811
    weight = table_weight(form, outputs, inputs)
    linear = NativeBlockLinear(tiles, weight, 1)
    exact = weight.dequantized(torch.float64)
    rounded = linear.to_float32(torch.eye(inputs, dtype=BF16)).T.double()
    half_a_step = torch.ldexp(torch.ones_like(exact), exact.frexp().exponent - 9)
    assert ((rounded - exact).abs() <= half_a_step).all()
    for num_tokens in (1, 16, TILES_FROM, 65, 130):
        x = guarded((num_tokens, inputs), 2)
        bound = x.double().abs() @ rounded.abs().T * 4e-6
        assert ((linear.to_float32(x).double() - x.double() @ rounded.T).abs() <= bound).all()
        assert torch.equal(linear(x), linear.to_float32(x).to(BF16))


def test_a_weight_with_others_has_the_values_of_each():
    parts = [table_weight(IQ4, 32, 64), table_weight(MXFP4, 32, 64, 1), block_weight(32, 64, 4, True, 2)]
    expected = torch.cat([part.dequantized(torch.float32) for part in parts])
    assert torch.equal(stack_blocks(parts).dequantized(torch.float32), expected)
    alike = stack_blocks([parts[1], table_weight(MXFP4, 16, 64, 3)])
    assert alike.bits == 4 and alike.table == MXFP4.table
    assert torch.equal(parts[0].take_blocks(torch.tensor([1])).dequantized(torch.float32), expected[:32, 32:])


def test_experts_are_products_of_their_own(library, form):
    def weights(outputs: int, inputs: int) -> list[NativeBlockLinear]:
        return [
            NativeBlockLinear(library, table_weight(form, outputs, inputs, seed), NO_TILES)
            for seed in range(4)
        ]

    experts = NativeExperts(library, weights(128, 64), weights(64, 64))
    gate_up, down = weights(128, 64), weights(64, 64)
    for num_tokens in (1, 7, 90):
        x = guarded((num_tokens, 64), 3)
        _, ids = routed(num_tokens, 4, 1, seed=num_tokens)
        expected = torch.empty(num_tokens, 64, dtype=BF16)
        for expert in range(4):
            mine = ids[:, 0] == expert
            expected[mine] = down[expert](NativeOps(library).silu_and_mul(gate_up[expert](x[mine])))
        assert torch.equal(experts(x, torch.ones(num_tokens, 1), ids), expected)


def test_a_recorded_call_keeps_its_table(best_library, form):
    linear = NativeBlockLinear(best_library, table_weight(form, 96, 64))
    x = guarded((3, 64), 1)
    recorded = record(best_library, Arena(), lambda: linear(x))
    assert recorded.program is not None, recorded.reason_against
    recorded.result.fill_(torch.nan)
    recorded.program.run()
    assert torch.equal(recorded.result, linear(x))


def test_tables_that_the_kernel_cannot_multiply_are_refused(best_library):
    for zero, table in ((0, (128,) * 16), (255, (127,) * 16), (8, (1,) * 15), (8, (256,) * 16)):
        weight = table_weight(BlockForm(4, zero, has_minima=False, table=table), 32, 32)
        with pytest.raises(AssertionError):
            NativeBlockLinear(best_library, weight)
    for of_halves in (
        replace(table_weight(NVFP4, 32, 32), table=None),
        replace(table_weight(NVFP4, 32, 64), scales=torch.ones(32, 2)),
        replace(table_weight(NVFP4, 32, 32), numbers=torch.zeros(32, 16, dtype=torch.uint8)),
    ):
        with pytest.raises(AssertionError):
            NativeBlockLinear(best_library, of_halves)
    weight = table_weight(NVFP4, 32, 32)
    weight.scales[3, 1] = torch.nan
    with pytest.raises(NotFiniteError):
        NativeBlockLinear(best_library, weight)
