"""Calls into sgl_kernel against the schemas of its wheels: torch checks them as it would with the real library.

The operators are those of `sgl_operators`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.model_runner.kernels import sgl

from .sgl_operators import define_operators
from .sgl_signatures import VERSIONS, function


@pytest.fixture(scope="module", params=VERSIONS)
def operators(request):
    """torch.ops.sgl_kernel of one version, under another name."""
    space = f"sgl_kernel_{request.param.replace('.', '_')}"
    library = define_operators(space, request.param)
    yield getattr(torch.ops, space)
    library._destroy()


def test_two_wheels_are_known():
    """The newest of those built for torch 2.11, and one of those that the extra `cuda` installs."""
    assert VERSIONS == ("0.4.10", "0.4.5")


@pytest.mark.parametrize("shape", [(3, 64), (3, 2, 16), (0, 64)])
def test_norm(operators, shape):
    norms = sgl.Norms(operators, pdl=sgl.supports_pdl((9, 0)))
    x = torch.randn(*shape, dtype=torch.bfloat16)
    weight = torch.randn(shape[-1], dtype=torch.bfloat16)
    for rows in (x, x.transpose(0, -1).contiguous().transpose(0, -1)):
        ours = norms.rms_norm(rows, weight, 1e-5)
        assert torch.equal(ours, F.rms_norm(x, x.shape[-1:], weight, 1e-5))
        assert ours.is_contiguous()


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_add_and_norm(operators, num_tokens):
    norms = sgl.Norms(operators, pdl=sgl.supports_pdl((8, 0)))
    wide = torch.randn(num_tokens, 100, dtype=torch.bfloat16)
    x, residual = wide[:, :64], torch.randn(num_tokens, 64, dtype=torch.bfloat16)
    weight = torch.randn(64, dtype=torch.bfloat16)
    added = x + residual
    ours, stream = norms.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(stream, added)
    assert torch.equal(ours, F.rms_norm(added, (64,), weight, 1e-5))


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_gates(operators, num_tokens):
    x = torch.randn(num_tokens, 80, dtype=torch.bfloat16)[:, :64]
    gate, up = x.chunk(2, -1)
    assert torch.equal(sgl.SglGatedActivation(operators.silu_and_mul.default)(x), F.silu(gate) * up)
    assert torch.equal(
        sgl.SglGatedActivation(operators.gelu_tanh_and_mul.default)(x), F.gelu(gate, approximate="tanh") * up
    )


def test_launches_overlap_since_hopper(operators):
    calls: list[Any] = []
    operator = SimpleNamespace(default=lambda *args: calls.append(args))
    recorded = SimpleNamespace(rmsnorm=operator, fused_add_rmsnorm=operator)
    x = torch.ones(1, 8)
    for capability in ((8, 9), (9, 0), (10, 0)):
        sgl.Norms(recorded, pdl=sgl.supports_pdl(capability)).rms_norm(x, x[0], 1e-6)
    assert [args[-1] for args in calls] == [False, True, True]


def test_a_call_that_the_wheel_does_not_know_is_noticed(operators):
    """So the tests above can fail."""
    x = torch.ones(1, 8)
    with pytest.raises(RuntimeError, match="missing value for argument 'enable_pdl'"):
        operators.rmsnorm.default(x, x, x[0], 1e-6)
    with pytest.raises(TypeError, match="unexpected keyword argument 'block_table'"):
        function(VERSIONS[0], "flash_attn.flash_attn_with_kvcache").bind(1, 2, 3, block_table=4)


def test_what_it_does_not_cover():
    assert sgl.reasons_against_dtype(torch.bfloat16) == []
    assert "not in float32" in sgl.reasons_against_dtype(torch.float32)[0]
    assert "float32" in sgl.reasons_against_wide_weights(True)[0]
    assert sgl.reasons_against_wide_weights(False) == []
    assert sgl.reasons_against_width(3072, torch.bfloat16) == []
    assert "multiple of 8, not 1540" in sgl.reasons_against_width(1540, torch.bfloat16)[0]
