"""Interleaved rotary, layers without rotary, norms over all heads, factors of q: every provider against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.model_runner.kernels import plain
from engine.model_runner.kernels.cpu.library import load_library, reasons_against_library
from engine.model_runner.kernels.native import NativeOps
from engine.model_runner.kernels.triton import rotary_store
from engine.model_runner.ops.rotation import HeadNorms, LayerKV, RotaryStore
from tests.triton_interpreter import repair_interpreter

repair_interpreter()

pytestmark = pytest.mark.usefixtures("poisoned")
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
HEADS = [(4, 2, 64, 64), (3, 1, 80, 32), (2, 2, 16, 16), (1, 1, 96, 66), (9, 3, 128, 0)]
"""Query heads, KV heads, head dim, how much of it rotates."""


@pytest.fixture(params=["torch", "native", "triton"])
def provider(request: pytest.FixtureRequest, device: torch.device) -> tuple[Any, torch.device]:
    match request.param:
        case "torch":
            return plain.rotate_and_store, device
        case "native":
            if reasons := reasons_against_library():
                pytest.skip("; ".join(reasons))
            return NativeOps(load_library()).rotate_and_store, torch.device("cpu")
        case _:
            return rotary_store.rotate_and_store, device


def exact(heads: Tensor, weight: Tensor | None, angles: Tensor, interleaved: bool) -> Tensor:
    """[T, heads, D] in float64: normalized, and each pair of numbers turned as one complex number."""
    heads = heads.double()
    if weight is not None:
        rows = heads if len(weight) == heads.shape[-1] else heads.flatten(1)
        rows = rows * (rows.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
        heads = rows.view(heads.shape)
    half = angles.shape[-1]
    index = torch.arange(half, device=heads.device)
    first, second = (2 * index, 2 * index + 1) if interleaved else (index, index + half)
    turned = torch.complex(heads[..., first], heads[..., second]) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    out = heads.clone()
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


@pytest.mark.fast_cases(11)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norms", ["none", "heads", "all heads"])
def test_every_form(provider, dtype, heads, interleaved, norms):
    rotate_and_store, device = provider
    num_q, num_kv, head_dim, rotary_dim = heads
    torch.manual_seed(0)
    num_tokens = 3
    qkv = torch.randn(num_tokens, num_q + 2 * num_kv, head_dim, device=device).to(dtype)
    weights: tuple[Tensor | None, Tensor | None] = (None, None)
    given = None
    if norms != "none":
        sizes = (head_dim, head_dim) if norms == "heads" else (num_q * head_dim, num_kv * head_dim)
        q_weight, k_weight = (1 + torch.randn(size, device=device).to(dtype) / 4 for size in sizes)
        weights, given = (q_weight, k_weight), HeadNorms(q_weight, k_weight, 1e-6)
    angles = torch.rand(num_tokens, rotary_dim // 2, dtype=torch.float64, device=device) * 6
    cos = angles.cos().repeat(1, 2).float()
    sin = torch.cat((-angles.sin(), angles.sin()), -1).float()
    factors = torch.rand(num_tokens, 1, device=device) + 0.5
    pool = torch.full((2, 9, num_kv, head_dim), torch.nan, device=device, dtype=dtype)
    kv, slots = LayerKV(pool[0], pool[1]), torch.tensor([5, 1, 7], device=device)
    q_heads, k_heads, v_heads = qkv.clone().split((num_q, num_kv, num_kv), dim=1)

    q = rotate_and_store(
        qkv, given, RotaryStore(cos, sin, kv, slots, interleaved=interleaved, query_factors=factors)
    )

    expected_q = exact(q_heads, weights[0], angles, interleaved) * factors.double().unsqueeze(-1)
    expected_k = exact(k_heads, weights[1], angles, interleaved)
    tolerance = 3 * ROUNDING[dtype]  # norm, rotation and factor each round once; parts may cancel
    torch.testing.assert_close(q.double(), expected_q, rtol=tolerance, atol=3 * tolerance)
    torch.testing.assert_close(kv.k[slots].double(), expected_k, rtol=tolerance, atol=3 * tolerance)
    assert torch.equal(kv.v[slots], v_heads)
    assert pool[:, [0, 2, 3, 4, 6, 8]].isnan().all()


@pytest.mark.fast_cases(8)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("quantizes", [False, True])
@pytest.mark.parametrize(
    ("parts", "heads"), [(3, (4, 2, 64)), (2, (3, 1, 80)), (2, (2, 2, 512)), (1, (4, 2, 32))], ids=str
)
def test_values_with_a_norm_and_layers_without_values_or_keys(provider, dtype, parts, heads, quantizes):
    """`parts`: q, k and v; q and k, which is also v; q alone."""
    rotate_and_store, device = provider
    if quantizes and rotate_and_store is rotary_store.rotate_and_store:
        pytest.skip("int8 pools are for CPUs")
    num_q, num_kv, head_dim = heads
    torch.manual_seed(0)
    qkv = torch.randn(3, num_q + (parts - 1) * num_kv, head_dim, device=device).to(dtype)
    weights = torch.unbind(1 + torch.randn(2, head_dim, device=device).to(dtype) / 4)
    angles = torch.rand(3, head_dim // 2, dtype=torch.float64, device=device) * 6
    angles[:, head_dim // 4 :] = 0.0  # as in Gemma 4
    cos = angles.cos().repeat(1, 2).float()
    sin = torch.cat((-angles.sin(), angles.sin()), -1).float()
    pool = torch.zeros((2, 9, num_kv, head_dim), device=device, dtype=torch.int8 if quantizes else dtype)
    scales = torch.zeros((2, 9, num_kv), device=device)
    kv = LayerKV(pool[0], pool[1], *(scales if quantizes else ()))
    slots = torch.tensor([5, 1, 7], device=device)
    q_heads, *others = qkv.clone().split([num_q, *[num_kv] * (parts - 1)], dim=1)

    q = rotate_and_store(
        qkv,
        HeadNorms(weights[0], weights[1], 1e-6, values=True),
        RotaryStore(cos, sin, kv if parts > 1 else None, slots, keys_are_values=parts == 2),
    )

    tolerance = 6 * ROUNDING[dtype]
    torch.testing.assert_close(
        q.double(), exact(q_heads, weights[0], angles, False), rtol=tolerance, atol=tolerance
    )
    if parts == 1:
        assert not pool.any() and not scales.any()
        return
    ones = torch.ones(head_dim, device=device)
    expected = (
        exact(others[0], weights[1], angles, False),
        exact(others[-1], ones, torch.zeros_like(angles), False),
    )
    for part, numbers, factors in zip(expected, pool, scales, strict=True):
        stored = numbers[slots].double() * (factors[slots].unsqueeze(-1) if quantizes else 1.0)
        torch.testing.assert_close(
            stored, part, rtol=tolerance, atol=0.5 * float(part.abs().max()) / 100 if quantizes else tolerance
        )


def test_a_scaled_number_is_rounded_once():
    if reasons := reasons_against_library():
        pytest.skip("; ".join(reasons))
    for dtype in ROUNDING:
        for size in (0, 1, 33, 4100):
            x = torch.randn(size).to(dtype)
            expected = (x.float() * 0.3).to(dtype)
            assert torch.equal(NativeOps(load_library()).scale(x.clone(), 0.3), expected)
            torch.testing.assert_close(plain.scale(x.clone(), 0.3), expected)
