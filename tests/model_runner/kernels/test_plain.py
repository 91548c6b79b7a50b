"""Operations in plain torch and through oneDNN against the formula in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.model_runner.kernels import plain
from engine.models.spec.experts_spec import Routing
from tests.model_runner.kernels.stacked_experts import StackedExperts


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_mlp_is_the_weighted_sum_of_its_experts(grouped, num_tokens, dtype):
    """Both ways: a loop over packed experts, and the grouped product of other devices, which torch has here, too."""
    torch.manual_seed(0)
    gate_up, down = torch.randn(6, 32, 24).to(dtype) / 5, torch.randn(6, 24, 16).to(dtype) / 4
    x = torch.randn(num_tokens, 24).to(dtype)
    shares, ids = plain.route(torch.randn(num_tokens, 6), Routing(num_active=3, normalize=True))
    pack = plain.pack_experts if grouped else plain.loop_experts

    ours = pack(StackedExperts(gate_up, down))(x, shares, ids)

    expected = torch.zeros(num_tokens, 24, dtype=torch.float64)
    for token in range(num_tokens):
        for share, expert in zip(shares[token], ids[token], strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            expected[token] += share.double() * (down[expert].double() @ (F.silu(gate) * up))
    assert ours.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours.double(), expected, atol=tolerance, rtol=tolerance)


def test_shares_are_a_part_of_one_or_all_of_it():
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    probs = logits.softmax(-1)[0]
    shares, ids = plain.route(logits, Routing(num_active=2, normalize=False))
    assert ids.tolist() == [[1, 2]]
    torch.testing.assert_close(shares[0], probs[[1, 2]])
    shares, _ = plain.route(logits, Routing(num_active=2, normalize=True))
    torch.testing.assert_close(shares[0], probs[[1, 2]] / probs[[1, 2]].sum())


def test_a_norm_with_a_wider_weight_is_rounded_once():
    torch.manual_seed(1)
    x = torch.randn(7, 3, 64).to(torch.bfloat16)
    weight = 1 + torch.randn(64) / 300  # such steps are lost in bfloat16
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    ours = plain.rms_norm(x, weight, 1e-6)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), expected, atol=0, rtol=2**-8)


def test_the_rest_of_a_head_does_not_rotate():
    x = torch.randn(5, 2, 16)
    angles = torch.rand(5, 1, 4)
    cos, sin = angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), -1)
    ours = plain.rotate(x, cos, sin)
    assert torch.equal(ours[..., 8:], x[..., 8:])
    torch.testing.assert_close(ours[..., :4], x[..., :4] * angles.cos() - x[..., 4:8] * angles.sin())
    torch.testing.assert_close(ours[..., 4:8], x[..., 4:8] * angles.cos() + x[..., :4] * angles.sin())


@pytest.mark.parametrize("pool_dtype", [torch.float8_e4m3fn, torch.float16, torch.float32])
def test_a_pool_of_another_type_holds_up_to_its_largest_number(pool_dtype):
    pool = torch.zeros(3, 1, 4).to(pool_dtype)
    plain.store(pool, torch.tensor([[[1e6, -1e6, 0.5, 448.0]]]).to(torch.bfloat16), torch.tensor([1]))
    most = min(torch.finfo(pool_dtype).max, 999424.0)  # a million in bfloat16
    assert pool.float()[1].tolist() == [[most, -most, 0.5, 448.0]]
    assert not pool.float()[[0, 2]].any()
