"""Our operations for the CPU against the formulas in float64, over random shapes, strides and dtypes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.model_runner.kernels import plain
from engine.model_runner.kernels.cpu.library import reasons_against_library
from engine.model_runner.kernels.native import (
    ACTIVATIONS,
    NativeOps,
    reasons_against_native,
)
from engine.model_runner.kernels.native_linear import NativeLinear, reasons_against_native_linear
from engine.model_runner.ops.rotation import HeadNorms, LayerKV, RotaryStore
from engine.models.spec.experts_spec import ClampedSwiGLU

BF16, F32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")
ROUNDING = {BF16: 2**-8, F32: 2e-6}  # of results, relative


@pytest.fixture
def ops(library):
    return NativeOps(library)


def guarded(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Random numbers in the middle of NaN: who reads beside them gets NaN."""
    size = torch.Size(shape).numel()
    memory = torch.full((size + 128,), torch.nan, dtype=dtype)
    part = memory[64 : 64 + size].view(shape)
    part.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
    return part


def close(ours: Tensor, exact: Tensor, extra: float = 0.0) -> None:
    rounding = ROUNDING[ours.dtype]
    torch.testing.assert_close(ours.double(), exact, rtol=rounding, atol=rounding / 64 + extra)


# ---------------------------------------------------------------- linear


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [(2, 1), (64, 64), (576, 200), (30, 129), (1536, 576), (10, 16), (128, 97)],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_is_the_product_for_any_number_of_tokens(library, inputs, outputs, has_bias):
    weight = guarded((outputs, inputs), BF16, 0) / inputs**0.5
    bias = guarded((outputs,), BF16, 1) if has_bias else None
    linear = NativeLinear(library, weight)
    for num_tokens in (0, 1, 2, 5, 6, 7, 13, 61, 130):
        x = guarded((num_tokens, inputs), BF16, 2)
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        close(linear(x, bias), exact, extra=1e-6 * inputs)
        precise = linear.to_float32(x, bias)
        torch.testing.assert_close(precise.double(), exact, rtol=1e-5, atol=1e-6 * inputs)
        assert torch.equal(precise.to(BF16), linear(x, bias))


@pytest.mark.parametrize(("inputs", "outputs"), [(2, 1), (576, 200), (30, 129)])
def test_rows_of_a_packed_weight_are_the_weight_s(library, inputs, outputs):
    bits = torch.randint(
        -(2**15), 2**15, (outputs, inputs), dtype=torch.int16, generator=torch.Generator().manual_seed(0)
    )
    linear = NativeLinear(library, bits.view(BF16))
    for ids in ([], [outputs - 1], [*range(outputs), 0, 0]):
        rows = linear.rows(torch.tensor(ids, dtype=torch.int64))
        assert torch.equal(rows.view(torch.int16), bits[ids])


def test_scaled_rows_are_those_of_a_table(library):
    """Of one thread's numbers and of several threads', and of widths that are no multiple of a vector."""
    for num_rows, inputs in ((1, 2), (3, 30), (700, 634)):
        table = guarded((97, inputs), BF16, 0)
        ids = torch.arange(num_rows) % 97
        rows = NativeLinear(library, table).rows(ids, 25.25)
        assert torch.equal(rows, (table[ids].float() * 25.25).to(BF16))
        assert torch.equal(rows, NativeOps(library).take_rows(table.contiguous(), ids, 25.25))


def test_linear_takes_strided_rows_and_other_weights(library):
    weight = guarded((96, 80), BF16, 0)[:, ::2]  # not contiguous
    wide = guarded((9, 100), BF16, 1)
    close(
        NativeLinear(library, weight)(wide[:, 7:47]), wide[:, 7:47].double() @ weight.double().T, extra=1e-4
    )
    transposed = guarded((40, 9), BF16, 2).T
    close(NativeLinear(library, weight)(transposed), transposed.double() @ weight.double().T, extra=1e-4)


def test_a_token_gets_the_same_bits_in_every_batch(library):
    linear = NativeLinear(library, guarded((577, 832), BF16, 0))  # cut into parts, other ones for few tokens
    x = guarded((300, 832), BF16, 1)
    everybody = linear(x)
    for num_tokens in (1, 2, 3, 6, 7, 18, 19, 50, 64, 121):
        assert torch.equal(linear(x[100 : 100 + num_tokens]), everybody[100 : 100 + num_tokens])


@pytest.mark.parametrize(("outputs", "is_gated"), [(1000, False), (992, True)])
def test_bits_do_not_depend_on_the_number_of_threads(library, outputs, is_gated):
    """16 panels: of 100 tokens 3 and 5 threads cut the last one, of 200 in two blocks 5 threads the last two."""
    linear = NativeLinear(library, guarded((outputs, 832), BF16, 0))
    if is_gated:
        assert linear.fuse_silu_and_mul()
    before = torch.get_num_threads()
    outs = []
    try:
        for num_threads in (1, 2, 3, 5):
            torch.set_num_threads(num_threads)
            outs.append([linear(guarded((n, 832), BF16, 1)) for n in (1, 7, 50, 100, 200)])
    finally:
        torch.set_num_threads(before)
    for alone, *others in zip(*outs, strict=True):
        assert all(torch.equal(alone, other) for other in others)


def test_weights_that_our_product_cannot_take_go_to_onednn(ops):
    odd = guarded((8, 7), BF16, 0)
    close(
        ops.pack_linear(odd)(guarded((3, 7), BF16, 1)),
        guarded((3, 7), BF16, 1).double() @ odd.double().T,
        1e-3,
    )
    assert not isinstance(ops.pack_linear(odd), NativeLinear)


def test_weights_are_compressed_with_avx512_and_without_tiles(library, request):
    level = request.node.callspec.params["library"]
    linear = NativeLinear(library, guarded((256, 256), BF16, 0))
    assert (linear.compressed() is not None) == (level in ("avx512_bf16", "avx512_vnni", "avx512"))
    assert linear.fuse_silu_and_mul()
    with pytest.raises(AssertionError):
        linear.compressed()


def test_with_amx_the_product_is_ours_too(monkeypatch):
    """And not oneDNN's, whose calls cannot be recorded."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert reasons_against_native_linear(CPU, BF16) == reasons_against_library()


def test_a_long_weight_is_cut_along_its_inputs(library):
    """For some tokens; the sums that wait meanwhile go on as they were."""
    weight = guarded((40, 8350), BF16, 0) / 91
    linear, x = NativeLinear(library, weight), guarded((230, 8350), BF16, 1)
    everybody = linear.to_float32(x)
    torch.testing.assert_close(everybody.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-3)
    for first, num_tokens in ((0, 1), (31, 2), (96, 33), (100, 65), (213, 17)):
        assert torch.equal(
            linear.to_float32(x[first : first + num_tokens]), everybody[first : first + num_tokens]
        )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    inputs=st.integers(1, 120).map(lambda half: 2 * half),
    outputs=st.integers(1, 150),
    num_tokens=st.integers(0, 70),
    offset=st.integers(0, 33),
    gap=st.integers(0, 5),
    has_bias=st.booleans(),
)
def test_linear_of_any_shape_and_stride(request, inputs, outputs, num_tokens, offset, gap, has_bias):
    library = request.getfixturevalue("best_library")
    weight = guarded((outputs, inputs), BF16, 0)
    bias = guarded((outputs,), BF16, 1) if has_bias else None
    wide = guarded((num_tokens, offset + inputs + gap), BF16, 2)
    wide[:, :offset] = torch.nan
    wide[:, offset + inputs :] = torch.nan
    x = wide[:, offset : offset + inputs]
    linear = NativeLinear(library, weight)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(linear.to_float32(x, bias).double(), exact, rtol=1e-5, atol=2e-6 * inputs)
    some = slice(num_tokens // 3, num_tokens // 3 + 5)
    assert torch.equal(linear(x[some], bias), linear(x, bias)[some])


GATED_SHAPES = [
    (64, 16),
    (30, 48),
    (576, 96),
    (832, 80),
    (10, 1040),
]  # panels end within, and behind, pairs of vectors


@pytest.mark.parametrize(("inputs", "width"), GATED_SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gated_product_has_the_bits_of_a_product_and_its_activation(library, inputs, width, has_bias):
    weight = guarded((2 * width, inputs), BF16, 0) / inputs**0.5 * 3
    bias = guarded((2 * width,), BF16, 1) if has_bias else None
    linear, fused = NativeLinear(library, weight), NativeLinear(library, weight)
    assert fused.fuse_silu_and_mul()
    for num_tokens in (0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 33, 61, 64, 130):
        x = guarded((num_tokens, inputs), BF16, 2)
        out = fused(x, bias)
        assert torch.equal(out, NativeOps(library).silu_and_mul(linear(x, bias)))
        gate, up = F.linear(x.double(), weight.double(), bias if bias is None else bias.double()).chunk(
            2, dim=1
        )
        torch.testing.assert_close(out.double(), F.silu(gate) * up, rtol=0.02, atol=0.02)
    ids = torch.arange(2 * width)
    assert torch.equal(fused.rows(ids.flip(0)), weight.flip(0))


def test_a_gated_product_writes_its_result_and_nothing_beside_it(library):
    fused, x = NativeLinear(library, guarded((96, 70), BF16, 0)), guarded((67, 70), BF16, 1)
    assert fused.fuse_silu_and_mul()
    for num_tokens in (1, 6, 35, 67):
        memory = torch.full((64 + num_tokens * 48 + 64,), 7.0, dtype=BF16)
        out = memory[64:-64].view(num_tokens, 48)
        fused._multiply(x[:num_tokens], None, out)
        assert (memory[:64] == 7).all() and (memory[-64:] == 7).all()
        assert torch.equal(out, fused(x)[:num_tokens])


def test_gated_bits_do_not_depend_on_the_number_of_threads(best_library):
    fused = NativeLinear(best_library, guarded((2016, 832), BF16, 0))
    assert fused.fuse_silu_and_mul()
    before = torch.get_num_threads()
    outs = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            outs.append([fused(guarded((n, 832), BF16, 1)) for n in (1, 7, 50, 200)])
    finally:
        torch.set_num_threads(before)
    for one, two, three in zip(*outs, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)


def test_gates_that_fill_no_vector_keep_their_own_operation(best_library):
    weight, x = guarded((48, 64), BF16, 0), guarded((3, 64), BF16, 1)
    linear = NativeLinear(best_library, weight)
    before = linear(x)
    assert not linear.fuse_silu_and_mul()
    assert torch.equal(linear(x), before) and torch.equal(linear.rows(torch.arange(48)), weight)


def test_linear_writes_its_result_and_nothing_beside_it(library):
    linear, x = NativeLinear(library, guarded((41, 70), BF16, 0)), guarded((35, 70), BF16, 1)
    for dtype in (BF16, F32):
        memory = torch.full((64 + 35 * 41 + 64,), 7.0, dtype=dtype)
        out = memory[64:-64].view(35, 41)
        linear._multiply(x, None, out)
        assert (memory[:64] == 7).all() and (memory[-64:] == 7).all()
        assert torch.equal(out, linear(x) if dtype == BF16 else linear.to_float32(x))


def test_numbers_that_are_none_stay_with_their_token(library):
    linear, x = NativeLinear(library, guarded((64, 96), BF16, 0)), guarded((40, 96), BF16, 1)
    expected = linear(x)
    x[3, 5], x[17, 95], x[33, 0] = torch.nan, torch.inf, -torch.inf
    out = linear(x)
    broken = [3, 17, 33]
    assert not out[broken].isfinite().any()
    others = [n for n in range(40) if n not in broken]
    assert torch.equal(out[others], expected[others])


def test_ours_and_onednn_s_products_take_turns_in_one_thread(best_library):
    """Both may use tiles, each with shapes of its own."""
    weight, x = guarded((96, 128), BF16, 0), guarded((50, 128), BF16, 1)
    linear = NativeLinear(best_library, weight)
    if plain.reasons_against_onednn(CPU, BF16):
        pytest.skip("oneDNN has no such product here")
    theirs = plain.pack_linear_onednn(weight)
    ours, other = linear(x), theirs(x)
    for num_tokens in (1, 50, 17, 33):
        assert torch.equal(linear(x[:num_tokens]), ours[:num_tokens])
        assert torch.equal(theirs(x), other)


def test_what_would_read_foreign_memory_is_refused(best_library):
    ops = NativeOps(best_library)
    linear = NativeLinear(best_library, guarded((16, 64), BF16, 0))
    x = guarded((2, 64), BF16, 1)
    for call in (
        lambda: NativeLinear(best_library, torch.ones(16, 64)),
        lambda: NativeLinear(best_library, torch.ones(16, 63, dtype=BF16)),
        lambda: linear(x.float()),
        lambda: linear(x[:, :32]),
        lambda: linear(x, torch.ones(16)),
        lambda: linear(x, torch.ones(8, dtype=BF16)),
        lambda: ops.rms_norm(x.float(), torch.ones(64, dtype=BF16), 1e-5),
        lambda: ops.rms_norm(x, torch.ones(32, dtype=BF16), 1e-5),
        lambda: ops.add_rms_norm(x, x.float(), torch.ones(64), 1e-5),
        lambda: ops.silu_and_mul(x.half()),
        lambda: ops.layer_norm(x, torch.ones(64), None, 1e-5),
        lambda: ops.layer_norm(x, torch.ones(64, dtype=BF16), torch.ones(32, dtype=BF16), 1e-5),
        lambda: ops.add_layer_norm(x, x[:1], torch.ones(64, dtype=BF16), None, 1e-5),
        lambda: ops.activate(x.half(), "gelu"),
    ):
        with pytest.raises(AssertionError):
            call()
    cos = torch.ones(2, 16, dtype=BF16)
    kv = LayerKV(*(torch.zeros(8, 1, 16, dtype=BF16) for _ in "kv"))
    qkv, loc = x.view(2, 4, 16), torch.tensor([1, 2])
    ops.rotate_and_store(qkv.clone(), None, RotaryStore(cos, cos, kv, loc))
    for norms, store in (
        (None, RotaryStore(cos, cos.float(), kv, loc)),
        (None, RotaryStore(cos, cos, kv, loc.int())),
        (None, RotaryStore(cos, cos, kv, loc[:1])),
        (None, RotaryStore(cos, cos, LayerKV(kv.k, kv.v.float()), loc)),
        (HeadNorms(torch.ones(16), torch.ones(16, dtype=BF16), 1e-6), RotaryStore(cos, cos, kv, loc)),
    ):
        with pytest.raises(AssertionError):
            ops.rotate_and_store(qkv.clone(), norms, store)


def test_reasons_name_what_is_wrong():
    assert reasons_against_native(torch.device("meta"), BF16) == ["runs on CPUs only, not on meta"]
    assert "not in torch.float16" in reasons_against_native(CPU, torch.float16)[0]
    assert "not torch.float32" in reasons_against_native_linear(CPU, F32)[0]


# ---------------------------------------------------------------- norms and activations

NORM_DTYPES = [(BF16, BF16), (BF16, F32), (F32, F32)]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@pytest.mark.parametrize(("dtype", "weight_dtype"), NORM_DTYPES)
@pytest.mark.parametrize("shape", [(0, 64), (1, 576), (5, 33), (3, 2, 16), (300, 100), (2, 1), (7, 40)])
def test_norms(ops, shape, dtype, weight_dtype):
    x, residual = guarded(shape, dtype, 0), guarded(shape, dtype, 1)
    weight = guarded((shape[-1],), weight_dtype, 2)
    close(ops.rms_norm(x, weight, 1e-5), norm(x.double(), weight, 1e-5))
    if len(shape) == 2:
        total = (x + residual).double()
        normed, new_residual = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
        assert torch.equal(new_residual.double(), total)
        close(normed, norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("shape", [(0, 64), (1, 1536), (5, 17), (200, 90), (3, 1)])
def test_activations(ops, shape, dtype):
    gate_up = guarded((shape[0], 2 * shape[1]), dtype, 0) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    close(ops.silu_and_mul(gate_up), F.silu(gate) * up, extra=2e-6)
    close(ops.gelu_and_mul(gate_up), F.gelu(gate, approximate="tanh") * up, extra=2e-6)
    close(ops.gelu_erf_and_mul(gate_up), F.gelu(gate) * up, extra=1e-5)
    limited = F.silu(gate).clamp(max=1.5) * up.clamp(-1.5, 1.5)
    close(ops.clamped_swiglu(gate_up, ClampedSwiGLU.after_silu(1.5)), limited, extra=2e-6)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(("tokens", "num_gates", "each"), [(0, 4, 16), (1, 96, 128), (5, 3, 17), (200, 6, 1)])
def test_a_gate_is_that_of_its_neighboring_numbers(ops, tokens, num_gates, each, dtype):
    x, gate = guarded((tokens, num_gates * each), dtype, 0), guarded((tokens, num_gates), dtype, 1) * 4
    expected = x.double() * gate.double().sigmoid().repeat_interleave(each, dim=1)
    close(plain.mul_sigmoid(gate, x.clone()), expected)
    close(ops.mul_sigmoid(gate, x.clone()), expected, extra=2e-6)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(0, 64), (1, 384), (5, 33), (3, 2, 16), (300, 100), (2, 3), (7, 40)])
def test_layer_norms(ops, shape, dtype, has_bias):
    x, residual = guarded(shape, dtype, 0) + 20, guarded(shape, dtype, 1)  # the mean is large
    weight, bias = guarded(shape[-1:], dtype, 2), guarded(shape[-1:], dtype, 3) if has_bias else None

    def exact(x: Tensor) -> Tensor:
        return F.layer_norm(
            x.double(), shape[-1:], weight.double(), None if bias is None else bias.double(), 1e-12
        )

    extra = 2e-5 if dtype == F32 else 0.0  # of the mean
    close(ops.layer_norm(x, weight, bias, 1e-12), exact(x), extra=extra)
    close(plain.layer_norm(x, weight, bias, 1e-12), exact(x), extra=extra)
    if len(shape) == 2:
        total = x + residual
        for provider in (ops, plain):
            normed, new_residual = provider.add_layer_norm(x.clone(), residual.clone(), weight, bias, 1e-12)
            assert torch.equal(new_residual, total)
            close(normed, exact(total), extra=extra)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("size", [0, 1, 15, 16, 4099, 40000])
def test_activations_in_place(ops, dtype, size):
    x = guarded((size,), dtype, 0) * 4
    exact = {
        "gelu": F.gelu(x.double()),
        "gelu_tanh": F.gelu(x.double(), approximate="tanh"),
        "relu": x.double().relu(),
        "relu2": x.double().relu().square(),
        "silu": F.silu(x.double()),
    }
    assert set(exact) == set(ACTIVATIONS)
    for kind, expected in exact.items():
        for provider in (ops, plain):
            close(provider.activate(x.clone(), kind), expected, extra=2e-6)


def test_the_exact_gelu_is_that_of_the_error_function_everywhere(ops):
    x = torch.linspace(-12, 12, 100_000)
    error = (ops.activate(x.clone(), "gelu").double() - F.gelu(x.double())).abs()
    assert error.max() < 1e-6 and error[x.abs() < 1].max() < 2e-7
    assert ops.activate(torch.tensor([torch.nan] * 17), "gelu").isnan().all()
    assert ops.activate(torch.tensor([-1e4, 1e4, 0.0]), "gelu").tolist() == [0.0, 1e4, 0.0]


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_without_rotary_keys_and_values_are_stored_as_they_are(ops, dtype):
    qkv, loc = guarded((5, 6, 32), dtype, 0), torch.tensor([9, 2, 7, 4, 5])
    nothing = torch.empty(5, 0, dtype=dtype)
    for provider in (ops, plain):
        kv = LayerKV(*(torch.full((12, 2, 32), 7.0, dtype=dtype) for _ in "kv"))
        q = provider.rotate_and_store(qkv.clone(), None, RotaryStore(nothing, nothing, kv, loc))
        assert torch.equal(q, qkv[:, :2])
        assert torch.equal(kv.k[loc], qkv[:, 2:4]) and torch.equal(kv.v[loc], qkv[:, 4:])
        assert (kv.k[[0, 1, 3, 6, 8, 10, 11]] == 7).all()


def test_activations_at_the_ends(ops):
    gate = torch.tensor([[-1e4, -200.0, -90.0, 90.0, 1e4, torch.inf, -torch.inf, torch.nan]])
    ours = ops.silu_and_mul(torch.cat((gate, torch.ones_like(gate)), -1))
    assert ours[0, :3].abs().max() < 1e-30
    assert ours[0, 3:6].tolist() == [90.0, 1e4, torch.inf]
    assert ours[0, 7].isnan()


def test_float_rounds_to_nearest_bfloat16_ties_to_even(ops):
    """The sum of a residual addition is rounded as torch rounds it, specials included."""
    bits = torch.randint(
        -(2**15), 2**15, (64, 96), dtype=torch.int16, generator=torch.Generator().manual_seed(0)
    )
    x, residual = bits.view(BF16), bits.flip(0).view(BF16)
    x[0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    tiny = (
        (x.abs() < 1e-37) | (residual.abs() < 1e-37) | ((x + residual).abs() < 1e-37)
    )  # some CPUs flush those
    _, total = ops.add_rms_norm(x.clone(), residual.clone(), torch.ones(96, dtype=BF16), 1e-5)
    expected = x + residual
    assert torch.equal(total.isnan(), expected.isnan())
    same = (total == expected) | expected.isnan() | tiny
    assert same.all()


# ---------------------------------------------------------------- rotary and KV


def rotated(
    qkv: Tensor, norms: HeadNorms | None, cos: Tensor, sin: Tensor, slots: Tensor, kv_heads: int
) -> tuple[Tensor, Tensor]:
    """q, and k as it is stored, in float64."""
    if norms is not None:
        norms = HeadNorms(norms.q_weight.double(), norms.k_weight.double(), norms.eps)
    pool = LayerKV(*(torch.zeros(100, kv_heads, qkv.shape[2], dtype=torch.float64) for _ in "kv"))
    q = plain.rotate_and_store(qkv.double(), norms, RotaryStore(cos.double(), sin.double(), pool, slots))
    return q, pool.k[slots]


@pytest.mark.fast_cases(30)
@pytest.mark.parametrize(
    ("dtype", "angles", "norm_dtype"),
    [
        (BF16, BF16, None),
        (BF16, BF16, BF16),
        (BF16, F32, F32),
        (F32, F32, F32),
        (F32, F32, None),
        (BF16, BF16, F32),
    ],
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary_dim"),
    [(9, 3, 64, 64), (2, 1, 16, 16), (4, 2, 96, 24), (1, 1, 8, 6), (3, 3, 128, 64)],
)
@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_rotate_and_store(ops, dtype, angles, norm_dtype, heads, kv_heads, dim, rotary_dim, num_tokens):
    qkv = guarded((num_tokens, heads + 2 * kv_heads, dim), dtype, 0)
    random = torch.Generator().manual_seed(3)
    angle = torch.rand(num_tokens, rotary_dim // 2, generator=random) * 6
    cos = angle.cos().repeat(1, 2).to(angles)
    sin = torch.cat((-angle.sin(), angle.sin()), -1).to(angles)
    norms = None
    if norm_dtype is not None:
        norms = HeadNorms(guarded((dim,), norm_dtype, 1), guarded((dim,), norm_dtype, 2), 1e-6)
    slots = torch.randperm(100, generator=random)[:num_tokens]
    pool = LayerKV(*(torch.full((100, kv_heads, dim), torch.nan, dtype=dtype) for _ in "kv"))

    q = ops.rotate_and_store(qkv.clone(), norms, RotaryStore(cos, sin, pool, slots))
    exact_q, exact_k = rotated(qkv, norms, cos, sin, slots, kv_heads)
    # What is added up: the two parts of a sum may be far larger than the sum, and each is rounded on its own.
    norms_abs = norms and HeadNorms(norms.q_weight.abs(), norms.k_weight.abs(), norms.eps)
    parts_q, parts_k = rotated(qkv.abs(), norms_abs, cos.abs(), sin.abs(), slots, kv_heads)
    # Norm and rotation round once each.
    for ours, exact, parts in ((q, exact_q, parts_q), (pool.k[slots], exact_k, parts_k)):
        assert ((ours.double() - exact).abs() <= 2 * ROUNDING[dtype] * parts).all()
    untouched = torch.ones(100, dtype=torch.bool)
    untouched[slots] = False
    assert pool.k[untouched].isnan().all()
    assert torch.equal(pool.v[slots], qkv[:, heads + kv_heads :])
    assert int((~pool.v.isnan().all(-1).all(-1)).sum()) == num_tokens


def test_a_pool_in_another_dtype_is_written_by_torch(ops):
    qkv = guarded((3, 4, 16), BF16, 0)
    cos, sin = torch.ones(3, 16, dtype=BF16), torch.zeros(3, 16, dtype=BF16)
    pool = LayerKV(*(torch.zeros(8, 1, 16, dtype=torch.float8_e4m3fn) for _ in "kv"))
    ops.rotate_and_store(qkv.clone(), None, RotaryStore(cos, sin, pool, torch.tensor([1, 5, 2])))
    torch.testing.assert_close(pool.v[[1, 5, 2]].float(), qkv[:, 3:].float(), rtol=0.07, atol=0.01)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("shape", [(1, 1, 16), (7, 3, 64), (40, 2, 40), (3, 2, 128)])
def test_keys_and_values_as_int8(ops, dtype, shape):
    """The same bits as plain torch's: a number is off by half a step at most, and what is not finite stays so."""
    num_tokens, num_kv_heads, head_dim = shape
    qkv = guarded((num_tokens, 3 * num_kv_heads, head_dim), dtype, 0)
    qkv[:, :, 0] *= torch.logspace(-8, 8, num_tokens).to(dtype).unsqueeze(1)
    qkv[0, num_kv_heads] = 0.0
    qkv[-1, -1, 1], qkv[num_tokens // 2, num_kv_heads, 2] = torch.nan, -torch.inf
    still = torch.ones(num_tokens, 2, dtype=dtype), torch.zeros(num_tokens, 2, dtype=dtype)
    loc = torch.arange(num_tokens) * 2 + 1
    pools = []
    for rotate_and_store in (ops.rotate_and_store, plain.rotate_and_store):
        numbers = [torch.full((2 * num_tokens + 1, *shape[1:]), 99, dtype=torch.int8) for _ in "kv"]
        scales = [torch.full(part.shape[:2], 99.0) for part in numbers]
        kv = LayerKV(*numbers, *scales)
        rotate_and_store(qkv.clone(), None, RotaryStore(*still, kv, loc))
        pools.append(kv)
        for part, scale, new in zip(numbers, scales, qkv.split(num_kv_heads, dim=1)[1:], strict=True):
            finite = new.isfinite().all(-1)
            assert torch.equal(scale[loc].isnan(), ~finite)
            assert (part[::2] == 99).all() and (scale[::2] == 99).all()
            stored = part[loc].double() * scale[loc].double().unsqueeze(-1)
            off = (stored - new.double()).abs() - 0.5001 * scale[loc].double().unsqueeze(-1)
            assert (off[finite] <= 1e-30).all()
    for ours, theirs in zip(*pools, strict=True):
        assert torch.equal(ours.nan_to_num(-1.0), theirs.nan_to_num(-1.0))
