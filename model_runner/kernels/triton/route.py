"""The router of a mixture of experts in Triton: scores and the choice of experts in one launch."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, possibly-undefined"
# Triton kernels: arguments have no type annotations, and branches on `tl.constexpr` values are taken at compile time.

# Shapes: T tokens, E experts, k active experts of a token.

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....models.spec.experts_spec import SCORES, Routing
from .kernel_variant import KernelVariant

_NUM_WARPS: Final = 1  # a few hundred values per token: more warps would mostly wait for each other


@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    shares_ptr,
    ids_ptr,
    logits_stride,
    num_experts,
    NUM_ACTIVE: tl.constexpr,
    SCORES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_ACTIVE_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    TOLERANCE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVE_BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    place = tl.arange(0, ACTIVE_BLOCK)
    lowest = -float("inf")
    exists = expert < num_experts
    logits = tl.load(logits_ptr + token * logits_stride + expert, mask=exists, other=lowest).to(tl.float32)
    # NaN ranks last, and padding is never chosen.
    logits = tl.where(logits != logits, lowest, logits)
    largest = tl.max(logits, axis=0)
    ids = tl.zeros([ACTIVE_BLOCK], dtype=tl.int32)
    shares = tl.zeros([ACTIVE_BLOCK], dtype=tl.float32)
    rest = logits
    if SCORES == 2:
        for n in tl.static_range(2):
            best = tl.argmax(rest, axis=0)
            most = tl.max(rest, axis=0)
            is_far = (most - logits) / tl.maximum(tl.abs(logits), most) > TOLERANCE
            total = tl.sum(tl.where(exists & (is_far == 0), tl.exp(rest - most), 0.0), axis=0)
            ids = tl.where(place == n, best, ids)
            shares = tl.where(place == n, 1.0 / total, shares)
            rest = tl.where(expert == best, lowest, rest)
    else:
        if SCORES == 1:
            scores = 1.0 / (1.0 + tl.exp(-logits))
        else:
            scores = tl.exp(logits - largest)
            scores = scores / tl.sum(scores, axis=0)
        if HAS_BIAS or GROUP_BEST > 1:  # else the order of the logits is that of the scores
            rest = scores
            if HAS_BIAS:
                rest += tl.load(bias_ptr + expert, mask=exists, other=0.0)
            rest = tl.where(exists, rest, lowest)
        if NUM_ACTIVE_GROUPS < NUM_GROUPS:
            rest = _in_best_groups(
                rest, expert, num_experts, NUM_GROUPS, NUM_ACTIVE_GROUPS, GROUP_BEST, GROUP_BLOCK
            )
        for n in tl.static_range(NUM_ACTIVE):
            best = tl.argmax(rest, axis=0)  # the first one among equals
            ids = tl.where(place == n, best, ids)
            shares = tl.where(place == n, tl.sum(tl.where(expert == best, scores, 0.0), axis=0), shares)
            rest = tl.where(expert == best, lowest, rest)
        if NORMALIZE:
            shares = shares / (tl.sum(shares, axis=0) + 1e-20)
        shares = shares * SCALE
    at = token * NUM_ACTIVE + place
    tl.store(shares_ptr + at, shares, mask=place < NUM_ACTIVE)
    tl.store(ids_ptr + at, ids.to(tl.int64), mask=place < NUM_ACTIVE)


@triton.jit
def _in_best_groups(
    choice,
    expert,
    num_experts,
    NUM_GROUPS: tl.constexpr,
    NUM_ACTIVE_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
):
    """The numbers to choose by, minus infinity outside of the best groups."""
    lowest = -float("inf")
    group = tl.arange(0, GROUP_BLOCK)
    group_of = expert // (num_experts // NUM_GROUPS)
    values = tl.full([GROUP_BLOCK], lowest, dtype=tl.float32)
    for g in tl.static_range(NUM_GROUPS):
        members = tl.where(group_of == g, choice, lowest)
        value = tl.max(members, axis=0)
        if GROUP_BEST == 2:
            members = tl.where(expert == tl.argmax(members, axis=0), lowest, members)
            value += tl.max(members, axis=0)
        values = tl.where(group == g, value, values)
    is_active = expert < 0
    for _ in tl.static_range(NUM_ACTIVE_GROUPS):
        best = tl.argmax(values, axis=0)
        is_active = is_active | (group_of == best)
        values = tl.where(group == best, lowest, values)
    return tl.where(is_active, choice, lowest)


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Among equals the expert with the smaller index comes first."""
    num_tokens, num_experts = logits.shape
    num_active = routing.num_active
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    shares = torch.empty((num_tokens, num_active), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_tokens, num_active), dtype=torch.int64, device=logits.device)
    if num_tokens:
        _route_kernel[(num_tokens,)](
            logits,
            logits if bias is None else bias,
            shares,
            ids,
            logits.stride(0),
            num_experts,
            **_constants(routing, num_experts),
            num_warps=_NUM_WARPS,
        )
    return shares, ids


def _constants(routing: Routing, num_experts: int) -> dict[str, Any]:
    return {
        "NUM_ACTIVE": routing.num_active,
        "SCORES": SCORES.index(routing.scores),
        "HAS_BIAS": routing.has_bias,
        "NUM_GROUPS": routing.num_groups,
        "NUM_ACTIVE_GROUPS": routing.num_active_groups,
        "GROUP_BEST": routing.group_best,
        "NORMALIZE": routing.normalize,
        "SCALE": routing.scale,
        "TOLERANCE": routing.mixer_tolerance,
        "BLOCK": triton.next_power_of_2(num_experts),
        "ACTIVE_BLOCK": triton.next_power_of_2(routing.num_active),
        "GROUP_BLOCK": triton.next_power_of_2(routing.num_groups),
    }


def variants() -> list[KernelVariant]:
    signature = {"logits_ptr": "*bf16", "bias_ptr": "*bf16", "shares_ptr": "*fp32", "ids_ptr": "*i64"}
    signature |= {"logits_stride": "i32:16", "num_experts": "i32:16"}
    in_groups = Routing(
        num_active=8,
        scores="sigmoid",
        has_bias=True,
        num_groups=8,
        num_active_groups=4,
        group_best=2,
        scale=2.5,
        float32_logits=True,
    )
    found = [("Qwen3-30B-A3B", Routing(num_active=8), 128), ("DeepSeek V3", in_groups, 256)]
    found.append(("Phi-3.5-MoE", Routing(num_active=2, scores="mixer", mixer_tolerance=0.02), 16))
    wide = {"logits_ptr": "*fp32", "bias_ptr": "*fp32"}
    return [
        KernelVariant(
            f"route {name}",
            _route_kernel,
            signature | wide if routing.float32_logits else signature,
            _constants(routing, num_experts),
            _NUM_WARPS,
        )
        for name, routing, num_experts in found
    ]
