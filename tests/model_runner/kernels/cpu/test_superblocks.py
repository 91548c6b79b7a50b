"""Products with K-quants in superblocks against float64 and the values of the file, and how their rows are packed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.model_runner.kernels.blocks.native_blocks import (
    NO_TILES,
    TILES_FROM,
    BlocksSideBySide,
    NativeBlockLinear,
)
from engine.model_runner.kernels.blocks.stored_rows import StoredRows, stack_rows
from engine.model_runner.kernels.blocks.tensor_rows import TensorRows
from engine.model_runner.kernels.native import NativeOps
from engine.model_runner.kernels.native_experts import NativeExperts
from engine.model_runner.kernels.quantized import QuantizedLinears, QuantTarget
from engine.model_runner.recording.programs.arena import Arena
from engine.model_runner.recording.programs.native_program import record
from engine.models.gguf.ggml_types import dequantize
from tests.models.gguf.test_ggml_types import by_name, random_blocks

from .conftest import UsedMemory
from .test_native_blocks import guarded, quantized, tiles  # noqa: F401
from .test_native_experts import routed

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
TYPES = ("Q4_K", "Q5_K", "Q6_K")


def raw_rows(kind: str, outputs: int, inputs: int) -> np.ndarray:
    """Random, with scales of the size of a weight's; byte by byte random otherwise."""
    blocks = random_blocks(kind, outputs * inputs // 256)
    halves = blocks[:, 208:210] if kind == "Q6_K" else blocks[:, :4]
    halves[:] = (halves.copy().view(np.float16) / 4096).view(np.uint8)
    return blocks.reshape(outputs, -1)


def rows_of(kind: str, outputs: int, inputs: int) -> StoredRows:
    return StoredRows((TensorRows(raw_rows(kind, outputs, inputs), by_name(kind)),))


def sizes_of(weight: StoredRows) -> torch.Tensor:
    """Bounds of the parts of a weight, which may be larger than their sum: [N, K] float64."""
    (one,) = weight.tensors
    upper = one.raw.copy()
    blocks = upper.reshape(-1, one.ggml_type.block_bytes)
    halves = blocks[:, 208:210] if one.ggml_type.name == "Q6_K" else blocks[:, :4]
    halves[:] = np.abs(halves.copy().view(np.float16)).view(np.uint8)
    if one.ggml_type.name == "Q6_K":
        return torch.from_numpy(np.abs(dequantize(upper, one.ggml_type))).double() * 32
    blocks[:, 2:4] = 0
    scaled = torch.from_numpy(dequantize(upper, one.ggml_type)).double()
    return scaled + (weight.dequantized(F64) - scaled).abs()


def check(linear: NativeBlockLinear, weight: StoredRows, x: torch.Tensor, bias=None) -> torch.Tensor:
    """Against float64, up to the rounding of float32 sums and of the result."""
    numbers = quantized(x)
    exact = numbers @ weight.dequantized(F64).T + (0 if bias is None else bias.double())
    bound = numbers.abs() @ sizes_of(weight).T + (0 if bias is None else bias.double().abs())
    precise = linear.to_float32(x, bias)
    assert ((precise.double() - exact).abs() <= 1e-6 * bound).all()
    assert torch.equal(linear(x, bias), precise.to(BF16))
    return precise


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 1), (768, 97), (1536, 64)])
def test_it_is_the_product_with_the_file_s_values_and_has_the_same_bits_in_every_batch(
    library, kind, inputs, outputs
):
    weight = rows_of(kind, outputs, inputs)
    linear = NativeBlockLinear(library, weight, NO_TILES)
    bias = guarded((outputs,), 1) if inputs == 768 else None
    x = guarded((300, inputs), 2)
    everybody = check(linear, weight, x, bias)
    for num_tokens in (0, 1, 2, 3, 4, 5, 6, 7, 9, 61):
        part = slice(100, 100 + num_tokens)
        assert torch.equal(linear.to_float32(x[part], bias), everybody[part])


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
def test_integers_at_the_ends_do_not_overflow(library, kind, byte):
    """With x of one sign, and of the same sign in the bytes whose products are added up in 16 bits first."""
    raw = np.full_like(raw_rows(kind, 32, 256), byte)
    halves = raw[:, 208:210] if kind == "Q6_K" else raw[:, :4]
    halves[:] = np.array([0.001] * (halves.shape[1] // 2), dtype=np.float16).view(np.uint8)
    weight = StoredRows((TensorRows(raw, by_name(kind)),))
    signs = torch.tensor([[1, 1, 1, 1], [-1, -1, -1, -1], [1, 1, -1, -1], [-1, -1, 1, 1]], dtype=BF16)
    x = signs.repeat(3, 64)
    check(NativeBlockLinear(library, weight, NO_TILES), weight, x)


@pytest.mark.parametrize("kind", TYPES)
def test_a_gated_product_has_the_bits_of_a_product_and_its_activation(library, kind):
    for width in (16, 80):
        weight = rows_of(kind, 2 * width, 512)
        linear, fused = (NativeBlockLinear(library, weight, 8) for _ in range(2))
        assert fused.fuse_silu_and_mul()
        for num_tokens in (1, 5, 33):
            x = guarded((num_tokens, 512), 2)
            assert torch.equal(fused(x), NativeOps(library).silu_and_mul(linear(x)))
        ids = torch.arange(2 * width)
        assert torch.equal(fused.rows(ids), linear.rows(ids))


@pytest.mark.parametrize("kind", TYPES)
def test_rows_are_the_file_s_values(library, kind):
    weight = rows_of(kind, 97, 512)
    linear = NativeBlockLinear(library, weight)
    ids = torch.tensor([96, *range(97), 0])
    exact = weight.dequantized(F64)[ids]
    assert ((linear.rows(ids).double() - exact).abs() <= 2**-8 * exact.abs() + 1e-7).all()
    assert linear.num_bytes == 128 * 2 * by_name(kind).block_bytes  # as in the file, in whole panels
    assert weight.num_bytes == 97 * 2 * by_name(kind).block_bytes


@pytest.mark.parametrize("kind", TYPES)
def test_rows_and_superblocks_in_another_order_with_others_and_padding(library, kind):
    raw, ggml_type = raw_rows(kind, 100, 1024), by_name(kind)
    rows, blocks = torch.randperm(100)[:75], torch.arange(32).view(4, 8)[[3, 0, 2]].flatten()
    first = TensorRows(raw, ggml_type, rows, blocks)
    second = TensorRows(raw_rows(kind, 40, 768), ggml_type)
    weight = stack_rows([StoredRows((first,)), StoredRows((second,)).padded(50)])
    expected = (
        torch.from_numpy(dequantize(raw[rows.numpy()], ggml_type)).view(75, 4, 256)[:, [3, 0, 2]].flatten(1)
    )
    expected = torch.cat(
        (expected, torch.from_numpy(dequantize(second.raw, ggml_type)), torch.zeros(10, 768))
    )
    assert weight.is_in_superblocks and torch.equal(weight.dequantized(F32), expected)
    linear = NativeBlockLinear(library, weight, NO_TILES, UsedMemory())
    found = linear.rows(torch.arange(125)).double()
    assert ((found - expected.double()).abs() <= 2**-8 * expected.abs() + 1e-7).all()


def test_parts_of_superblocks_are_held_in_blocks(best_library):
    """As a rank's inputs may be, and those of delta nets."""
    raw, ggml_type = raw_rows("Q4_K", 33, 512), by_name("Q4_K")
    for blocks in (torch.arange(4, 12), torch.arange(16).flip(0), torch.arange(4)):
        weight = StoredRows((TensorRows(raw, ggml_type, blocks=blocks),))
        assert not weight.is_in_superblocks
        linear = NativeBlockLinear(best_library, weight)
        exact = weight.dequantized(F64)
        found = linear.rows(torch.arange(33)).double()
        assert ((found - exact).abs() <= 2**-7 * exact.abs() + 1e-3).all()
        assert linear.num_bytes == 64 * len(blocks) * 20 and weight.num_bytes == 33 * len(blocks) * 20


@pytest.mark.parametrize("offset", [0, 2])
def test_values_that_are_not_finite_are_seen(offset):
    raw = raw_rows("Q4_K", 4, 512)
    assert TensorRows(raw, by_name("Q4_K")).is_finite
    raw[2, 144 + offset : 146 + offset] = np.array([np.inf], dtype=np.float16).view(np.uint8)
    assert not TensorRows(raw, by_name("Q4_K")).is_finite
    assert TensorRows(raw, by_name("Q4_K"), torch.tensor([0, 1, 3])).is_finite


def test_experts_are_products_of_their_own(library):
    """Superblocks of some experts beside blocks of others."""

    def weights(outputs: int, inputs: int) -> list[NativeBlockLinear]:
        kinds = (*TYPES, "Q8_0")
        raw = {kind: random_blocks(kind, outputs * inputs // by_name(kind).block_len) for kind in kinds}
        return [
            NativeBlockLinear(
                library,
                StoredRows((TensorRows(raw[kind].reshape(outputs, -1), by_name(kind)),)),
                NO_TILES,
            )
            for kind in kinds
        ]

    experts = NativeExperts(library, weights(512, 256), weights(256, 256))
    gate_up, down = weights(512, 256), weights(256, 256)
    for num_tokens in (1, 7, 90):
        x = guarded((num_tokens, 256), 3)
        _, ids = routed(num_tokens, 4, 1, seed=num_tokens)
        expected = torch.empty(num_tokens, 256, dtype=BF16)
        for expert in range(4):
            mine = ids[:, 0] == expert
            expected[mine] = down[expert](NativeOps(library).silu_and_mul(gate_up[expert](x[mine])))
        assert torch.equal(experts(x, torch.ones(num_tokens, 1), ids), expected)


def test_parts_in_different_forms_stay_as_they_are_and_are_recorded(best_library):
    target = QuantTarget(
        device=torch.device("cpu"), dtype=BF16, capability=(0, 0), triton_reason="-", sgl_reason="-"
    )
    linears = QuantizedLinears(target, lambda weight: pytest.fail("not plain"))
    parts = [rows_of("Q4_K", 64, 256), rows_of("Q4_K", 20, 256), rows_of("Q6_K", 33, 256)]
    packed = linears.pack(parts)
    assert isinstance(packed, BlocksSideBySide) and [one.shape[0] for one in packed.weights] == [84, 33]
    bias, x = guarded((117,), 1), guarded((5, 256), 2)
    expected = torch.cat(
        [
            NativeBlockLinear(best_library, part).to_float32(x, added)
            for part, added in zip(parts, bias.split([64, 20, 33]), strict=True)
        ],
        dim=1,
    )
    assert torch.equal(packed.to_float32(x, bias), expected)
    recorded = record(best_library, Arena(), lambda: packed(x, bias))
    assert recorded.program is not None, recorded.reason_against
    recorded.result.fill_(torch.nan)
    recorded.program.run()
    assert torch.equal(recorded.result, expected.to(BF16))
    assert isinstance(linears.pack(parts, as_one=True), NativeBlockLinear)


@pytest.mark.parametrize("kind", TYPES)
def test_tiles_give_the_product_with_weights_in_bfloat16(tiles, kind):  # noqa: F811
    for inputs, outputs in ((256, 1), (768, 97)):
        weight = rows_of(kind, outputs, inputs)
        linear, never = NativeBlockLinear(tiles, weight), NativeBlockLinear(tiles, weight, NO_TILES)
        x = guarded((130, inputs), 2)
        exact_weight = weight.dequantized(F64)
        bound = x.double().abs() @ (exact_weight.abs() * 2**-8.99 + sizes_of(weight) * 4e-6).T
        many, few = linear.to_float32(x), never.to_float32(x)
        assert ((many.double() - x.double() @ exact_weight.T).abs() <= bound + 1e-6).all()
        for num_tokens in (1, TILES_FROM - 1, TILES_FROM, 65):
            assert torch.equal(
                linear.to_float32(x[:num_tokens]), (many if num_tokens >= TILES_FROM else few)[:num_tokens]
            )
