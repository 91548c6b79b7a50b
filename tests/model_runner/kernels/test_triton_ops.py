"""Triton's norms, gates, rotary and KV store against the formulas in float64, with outputs that start as NaN."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model_runner.kernels import plain
from engine.model_runner.kernels.triton import activation, norm, rotary_store
from engine.model_runner.ops.rotation import HeadNorms, LayerKV, RotaryStore
from tests.selection import examples
from tests.triton_interpreter import repair_interpreter

repair_interpreter()

pytestmark = pytest.mark.usefixtures("poisoned")
DTYPES = (torch.float32, torch.bfloat16)
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-8}  # of a number that is rounded once, relative to it
SOME = settings(max_examples=examples(9))  # the interpreter takes milliseconds for each program


def close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    torch.testing.assert_close(
        ours.double(),
        exact.double(),
        rtol=ROUNDING[ours.dtype],
        atol=1e-6 if ours.dtype == torch.float32 else 1e-5,
    )


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def spread(shape: tuple[int, ...], dtype: torch.dtype, gap: int, device: torch.device) -> torch.Tensor:
    """Random numbers whose rows lie `gap` numbers apart; NaN is in between."""
    whole = torch.full((*shape[:-1], shape[-1] + gap), torch.nan, device=device, dtype=dtype)
    part = whole[..., : shape[-1]]
    part.copy_(torch.randn(shape, device=device) * 3)
    return part


@SOME
@given(
    num_rows=st.integers(0, 5),
    size=st.sampled_from([1, 64, 96, 576, 1000, 2048]),
    dtype=st.sampled_from(DTYPES),
    wide_weight=st.booleans(),
    gap=st.sampled_from([0, 3, 64]),
    eps=st.sampled_from([1e-6, 1e-5]),
)
def test_norms_of_rows_with_any_stride(device, num_rows, size, dtype, wide_weight, gap, eps):
    x = spread((num_rows, size), dtype, gap, device)
    weight = torch.randn(size, device=device).to(torch.float32 if wide_weight else dtype)

    ours = norm.rms_norm(x, weight, eps)
    assert ours.dtype == dtype and ours.is_contiguous()
    close(ours, exact_norm(x, weight, eps))

    residual = spread((num_rows, size), dtype, gap, device)
    added = x.double() + residual.double()
    ours, stream = norm.add_rms_norm(x, residual, weight, eps)
    close(stream, added)
    close(ours, exact_norm(stream, weight, eps))


def test_a_norm_of_the_widest_row(device):
    x, weight = torch.randn(2, 16384, device=device), torch.randn(16384, device=device)
    close(norm.rms_norm(x, weight, 1e-6), exact_norm(x, weight, 1e-6))


def test_a_norm_of_heads_that_lie_inside_wider_rows(device):
    qkv = torch.randn(3, 9, 64, device=device)
    q, weight = qkv[:, :4], torch.randn(64, device=device)
    close(norm.rms_norm(q, weight, 1e-6), exact_norm(q, weight, 1e-6))


@SOME
@given(
    num_tokens=st.integers(0, 4),
    width=st.sampled_from([1, 40, 96, 257, 768]),
    dtype=st.sampled_from(DTYPES),
    gap=st.sampled_from([0, 5]),
)
def test_gates(device, num_tokens, width, dtype, gap):
    x = spread((num_tokens, 2 * width), dtype, gap, device)
    gate, up = x.double().chunk(2, dim=-1)
    close(activation.silu_and_mul(x), F.silu(gate) * up)
    close(activation.gelu_and_mul(x), F.gelu(gate, approximate="tanh") * up)


def test_gates_in_large_pieces_and_of_large_numbers(device, monkeypatch):
    monkeypatch.setattr(activation, "_ENOUGH_PROGRAMS", 1)
    gate = torch.linspace(-200, 200, 1500, device=device)
    x = torch.cat((gate, torch.ones_like(gate))).expand(2, -1)  # rows without a distance
    close(activation.silu_and_mul(x)[1], F.silu(gate.double()))
    close(activation.gelu_and_mul(x)[1], F.gelu(gate.double(), approximate="tanh"))


# Query heads, KV heads, head dim, how much of it rotates.
HEADS = [
    (4, 2, 64, 64),
    (9, 3, 64, 64),
    (2, 2, 80, 32),
    (3, 1, 96, 72),
    (2, 1, 128, 128),
    (1, 1, 256, 256),
    (5, 1, 16, 4),
]


def inputs(device, num_tokens, heads, dtype, with_norms, *, gap=0, pool_dtype=None, num_slots=40):
    num_q, num_kv, head_dim, rotary_dim = heads
    qkv = spread((num_tokens, (num_q + 2 * num_kv) * head_dim), dtype, gap, device)
    qkv = qkv.unflatten(1, (-1, head_dim))
    norms = None
    if with_norms:
        norms = HeadNorms(torch.randn(head_dim, device=device), torch.randn(head_dim, device=device), 1e-6)
    angles = torch.rand(num_tokens, rotary_dim // 2, device=device) * 6
    cos = angles.cos().repeat(1, 2)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1)
    pool = torch.full((2, num_slots, num_kv, head_dim), torch.nan, device=device).to(pool_dtype or dtype)
    slots = torch.randperm(num_slots - 1, device=device)[:num_tokens] + 1
    return qkv, norms, cos, sin, LayerKV(pool[0], pool[1]), slots


@SOME
@given(
    num_tokens=st.integers(0, 4),
    heads=st.sampled_from(HEADS),
    dtype=st.sampled_from(DTYPES),
    with_norms=st.booleans(),
    gap=st.sampled_from([0, 7]),
    seed=st.integers(0, 1000),
)
def test_rotary_norms_and_the_pool(device, num_tokens, heads, dtype, with_norms, gap, seed):
    torch.manual_seed(seed)
    qkv, norms, cos, sin, kv, slots = inputs(device, num_tokens, heads, dtype, with_norms, gap=gap)
    before = qkv.clone()
    exact_kv = LayerKV(*(part.double() for part in (kv.k, kv.v)))
    exact_norms = norms and HeadNorms(norms.q_weight.double(), norms.k_weight.double(), norms.eps)
    exact_q = plain.rotate_and_store(
        qkv.double(), exact_norms, RotaryStore(cos.double(), sin.double(), exact_kv, slots)
    )

    q = rotary_store.rotate_and_store(qkv, norms, RotaryStore(cos, sin, kv, slots))

    assert q.dtype == dtype and q.is_contiguous()
    close(q, exact_q)
    assert torch.equal(qkv, before)
    for ours, exact in zip(kv[:2], exact_kv[:2], strict=True):
        close(ours[slots], exact[slots])
        assert ours.isnan().any(-1).any(-1).sum() == len(ours) - num_tokens  # nothing else was written
    assert torch.equal(kv.v[slots], qkv[:, -heads[1] :])


def test_many_tokens_take_many_heads_at_a_time(device, monkeypatch):
    monkeypatch.setattr(rotary_store, "_MANY_PROGRAMS", 1)
    qkv, norms, cos, sin, kv, slots = inputs(device, 3, (9, 3, 80, 48), torch.bfloat16, True)
    q = rotary_store.rotate_and_store(qkv, norms, RotaryStore(cos, sin, kv, slots))
    pool = [part[slots].clone() for part in (kv.k, kv.v)]
    monkeypatch.setattr(rotary_store, "_MANY_PROGRAMS", 1 << 30)
    close(rotary_store.rotate_and_store(qkv, norms, RotaryStore(cos, sin, kv, slots)), q)
    for few, many in zip(kv[:2], pool, strict=True):
        close(few[slots], many)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("pool_dtype", [torch.float8_e4m3fn, torch.float16, torch.float32])
def test_a_pool_of_another_type(device, pool_dtype):
    """Rounded to the model's type first, as where the pool has that; then to the pool's, up to its largest number."""
    qkv, norms, cos, sin, kv, slots = inputs(device, 4, (2, 2, 64, 48), torch.bfloat16, False)
    qkv[0, 2:] *= 1e6
    qkv[1, 2:] *= 2.0**-12
    other = LayerKV(*(torch.zeros_like(part, dtype=torch.float32).to(pool_dtype) for part in (kv.k, kv.v)))
    rotary_store.rotate_and_store(qkv, norms, RotaryStore(cos, sin, kv, slots))
    rotary_store.rotate_and_store(qkv, norms, RotaryStore(cos, sin, other, slots))
    for same, converted in zip(kv[:2], other[:2], strict=True):
        expected = torch.zeros_like(same, dtype=torch.float32).to(pool_dtype)
        plain.store(expected, same[slots], slots)
        assert torch.equal(converted.float(), expected.float())
        assert pool_dtype == torch.float32 or converted.float().abs().max() == torch.finfo(pool_dtype).max


@triton.jit
def _e4m3_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(out_ptr + index, rotary_store.e4m3_bits(tl.load(x_ptr + index).to(tl.float32)))


def test_every_bfloat16_becomes_the_8_bit_float_that_torch_makes_of_it(device):
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(device)
    bits = torch.empty(1 << 16, dtype=torch.uint8, device=device)
    _e4m3_kernel[(1,)](x, bits, BLOCK=1 << 16)
    expected = x.float().clamp(-448, 448).to(torch.float8_e4m3fn)
    ours = bits.view(torch.float8_e4m3fn)
    assert torch.equal(ours.float().isnan(), x.isnan())
    known = ~x.isnan()
    assert torch.equal(bits[known], expected.view(torch.uint8)[known])


def test_ties_between_8_bit_floats_go_to_the_even_one(device):
    """What lies exactly between two neighbors, and a hair beside it."""
    values = torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (values[1:] + values[:-1]) / 2
    x = torch.cat((middles, middles.nextafter(torch.tensor(0.0)), middles.nextafter(torch.tensor(1e9))))
    x = F.pad(torch.cat((x, -x)), (0, 1024 - 6 * len(middles))).to(device)
    bits = torch.empty(1024, dtype=torch.uint8, device=device)
    _e4m3_kernel[(1,)](x, bits, BLOCK=1024)
    assert torch.equal(bits, x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_a_pool_of_more_than_2_gib_numbers(device):
    """Offsets beyond 32 bits. On the CPU only the pages that are written take memory."""
    num_kv, head_dim = 8, 256
    num_slots = (1 << 31) // (num_kv * head_dim) + 3
    shape = (num_slots, num_kv, head_dim)
    if device.type == "cpu":
        pool = torch.from_numpy(np.empty(shape, dtype=np.uint8)).view(torch.float8_e4m3fn)
    else:
        pool = torch.zeros(shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    qkv, _, cos, sin, _, _ = inputs(device, 2, (1, num_kv, head_dim, head_dim), torch.bfloat16, False)
    slots = torch.tensor([num_slots - 1, 1], device=device)
    rotary_store.rotate_and_store(qkv, None, RotaryStore(cos, sin, LayerKV(pool, pool), slots))
    expected = qkv[:, -num_kv:].to(torch.float8_e4m3fn)
    assert torch.equal(
        pool[num_slots - 1].float(), expected[0].float()
    )  # the values, written last or by the same
    assert torch.equal(pool[1].float(), expected[1].float())


def test_what_does_not_fit_is_not_written(device):
    qkv, norms, cos, sin, kv, slots = inputs(device, 2, (2, 1, 64, 64), torch.bfloat16, False)
    with pytest.raises(ValueError, match="do not fit"):
        rotary_store.rotate_and_store(
            qkv, norms, RotaryStore(cos, sin, LayerKV(kv.k, kv.v[:, :, :32]), slots)
        )
    with pytest.raises(ValueError, match=r"slots \[1\]"):
        rotary_store.rotate_and_store(qkv, norms, RotaryStore(cos, sin, kv, slots[:1]))
    assert kv.k.isnan().all() and kv.v.isnan().all()


def test_padding_rows_share_the_dummy_slot(device):
    qkv, norms, cos, sin, kv, _ = inputs(device, 4, (2, 1, 64, 64), torch.bfloat16, False)
    slots = torch.tensor([3, 0, 0, 0], device=device)
    rotary_store.rotate_and_store(qkv, norms, RotaryStore(cos, sin, kv, slots))
    assert torch.equal(kv.v[3], qkv[0, 3:])
    assert kv.v[[1, 2, 4]].isnan().all()


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_that_is_not_a_number_stays_none(device, gelu, dtype):
    x = torch.tensor([[torch.nan, 1.0, 1.0, 1.0]], device=device, dtype=dtype)
    gate = activation.gelu_and_mul if gelu else activation.silu_and_mul
    assert gate(x).isnan().tolist() == [[True, False]]
