"""Experts with biases, a clamped activation, or weighted inputs: every kernel against the sum in float64."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model_runner.kernels import native_experts, plain
from engine.model_runner.kernels.cpu.library import load_library, reasons_against_library
from engine.model_runner.kernels.native import NativeOps
from engine.model_runner.kernels.native_experts import NativeExperts
from engine.model_runner.kernels.native_linear import pack_native_linear
from engine.model_runner.kernels.triton import experts as triton_experts
from engine.model_runner.recording.programs.arena import Arena
from engine.model_runner.recording.programs.native_program import record
from engine.models.spec.experts_spec import ClampedSwiGLU, Routing
from tests.model_runner.kernels.stacked_experts import StackedExperts, pack_linear_here
from tests.triton_interpreter import repair_interpreter

repair_interpreter()

CLAMP = ClampedSwiGLU(alpha=1.3, limit=1.5, gate_limit=1.2)  # a part of the values is beyond
AFTER_SILU = ClampedSwiGLU.after_silu(0.6)
cases = pytest.mark.parametrize(
    ("clamp", "has_bias", "scales"),
    [
        (CLAMP, True, False),
        (CLAMP, False, False),
        (AFTER_SILU, False, False),
        (None, True, False),
        (None, False, True),
    ],
    ids=["both", "clamp", "clamp after silu", "bias", "weighted inputs"],
)
NUM_EXPERTS, NUM_ACTIVE = 5, 2


@pytest.fixture
def library() -> ctypes.CDLL:
    """The kernels that this CPU serves with."""
    if reasons := reasons_against_library():
        pytest.skip("; ".join(reasons))
    return load_library()


def source(
    clamp: ClampedSwiGLU | None,
    has_bias: bool,
    dtype: torch.dtype,
    size: int,
    inner: int,
    pack: Any,
    scales: bool = False,
) -> StackedExperts:
    random = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    biases = draw(NUM_EXPERTS, 2 * inner).to(dtype), draw(NUM_EXPERTS, size).to(dtype)
    return StackedExperts(
        (draw(NUM_EXPERTS, 2 * inner, size) / size**0.5).to(dtype),
        (draw(NUM_EXPERTS, size, inner) / inner**0.5).to(dtype),
        pack,
        clamp,
        biases if has_bias else None,
        scales,
    )


def exact(experts: StackedExperts, x: Tensor, shares: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for share, expert in zip(shares[token], ids[token], strict=True):
            factor = share.double() if experts.scales_inputs else 1.0
            hidden = experts.gate_up[expert].double() @ (x[token].double() * factor)
            if experts.bias is not None:
                hidden += experts.bias[0][expert]
            gate, up = hidden.chunk(2)
            if experts.clamp is None:
                hidden = F.silu(gate) * up
            else:
                limit = experts.clamp.limit
                up = up.clamp(-limit, limit)
                if experts.clamp is AFTER_SILU:
                    hidden = F.silu(gate).clamp(max=limit) * up
                else:
                    gate = gate.clamp(max=CLAMP.gate_limit)
                    hidden = (up + 1) * gate * (CLAMP.alpha * gate).sigmoid()
            row = experts.down[expert].double() @ hidden
            row = row if experts.bias is None else row + experts.bias[1][expert]
            out[token] += row if experts.scales_inputs else share.double() * row
    return out


def routed(num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    logits = torch.randn(num_tokens, NUM_EXPERTS, generator=torch.Generator().manual_seed(seed))
    return plain.route(logits, Routing(num_active=NUM_ACTIVE))


@pytest.mark.fast_cases(5)
@cases
@pytest.mark.parametrize("provider", ["grouped", "looped", "native", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner", [32, 24])
def test_it_is_the_sum_that_it_stands_for(library, device, provider, dtype, inner, clamp, has_bias, scales):
    pack: Any = pack_linear_here
    if provider == "native":
        if dtype == torch.float32:
            pytest.skip("bfloat16 only")
        pack = lambda weight: pack_native_linear(library, weight, compress=True)  # noqa: E731
    experts = source(clamp, has_bias, dtype, 48, inner, pack, scales)
    make = {
        "grouped": plain.pack_experts,
        "looped": plain.loop_experts,
        "native": NativeOps(library).pack_experts,
        "triton": triton_experts.pack_experts,
    }[provider]
    if provider == "triton":
        experts = StackedExperts(
            experts.gate_up.to(device),
            experts.down.to(device),
            pack,
            clamp,
            None if experts.bias is None else (experts.bias[0].to(device), experts.bias[1].to(device)),
            scales,
        )
    packed = make(experts)
    assert provider != "native" or isinstance(packed, NativeExperts)
    for num_tokens in {"triton": (1, 5), "native": (0, 1, 7, 90)}.get(provider, (1, 7, 90)):
        x = torch.randn(num_tokens, 48, generator=torch.Generator().manual_seed(2)).to(dtype)
        shares, ids = routed(num_tokens)
        where = device if provider == "triton" else torch.device("cpu")
        ours = packed(x.to(where), shares.to(where), ids.to(where)).cpu()
        assert ours.dtype == dtype
        tolerance = 2e-5 if dtype == torch.float32 else 5e-2
        on_host = source(clamp, has_bias, dtype, 48, inner, pack, scales)
        torch.testing.assert_close(
            ours.double(), exact(on_host, x, shares, ids), atol=tolerance, rtol=tolerance
        )


@cases
def test_a_recorded_call_goes_where_the_router_says_each_time(library, clamp, has_bias, scales):
    pack = lambda weight: pack_native_linear(library, weight, compress=True)  # noqa: E731
    experts = NativeOps(library).pack_experts(source(clamp, has_bias, torch.bfloat16, 64, 32, pack, scales))
    x, logits = torch.randn(9, 64).to(torch.bfloat16), torch.zeros(9, NUM_EXPERTS)

    def compute() -> Tensor:
        return experts(x, *native_experts.route(library, logits, Routing(num_active=NUM_ACTIVE)))

    recorded = record(library, Arena(), compute)
    assert recorded.program is not None, recorded.reason_against
    for seed in range(3):
        logits.copy_(torch.randn(9, NUM_EXPERTS, generator=torch.Generator().manual_seed(seed)))
        recorded.program.run()
        assert torch.equal(recorded.result, compute())


def test_what_is_no_number_stays_none(library):
    pack = lambda weight: pack_native_linear(library, weight, compress=True)  # noqa: E731
    experts = NativeOps(library).pack_experts(source(CLAMP, True, torch.bfloat16, 64, 32, pack))
    x = torch.randn(3, 64).to(torch.bfloat16)
    x[1, 5] = torch.nan
    out = experts(x, *routed(3))
    assert out[1].isnan().all() and not out[[0, 2]].isnan().any()
