"""The router of a mixture of experts in Triton: softmax and top-k in one launch."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, possibly-undefined"
# Triton kernels: arguments have no type annotations, and branches on `tl.constexpr` values are taken at compile time.

# Shapes: T tokens, E experts, k active experts of a token.

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compile_report import KernelVariant

_NUM_WARPS: Final = 1  # a few hundred values per token: more warps would mostly wait for each other


@triton.jit
def _route_kernel(
    logits_ptr,
    shares_ptr,
    ids_ptr,
    logits_stride,
    num_experts,
    NUM_ACTIVE: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVE_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    place = tl.arange(0, ACTIVE_BLOCK)
    lowest = -float("inf")
    logits = tl.load(logits_ptr + token * logits_stride + expert, mask=expert < num_experts, other=lowest)
    logits = logits.to(tl.float32)
    # NaN ranks last, and padding is never chosen.
    logits = tl.where(logits != logits, lowest, logits)
    largest = tl.max(logits, axis=0)
    numerators = tl.exp(logits - largest)
    total = tl.sum(numerators, axis=0)

    ids = tl.zeros([ACTIVE_BLOCK], dtype=tl.int32)
    chosen = tl.zeros([ACTIVE_BLOCK], dtype=tl.float32)
    rest = logits
    for n in tl.static_range(NUM_ACTIVE):
        best = tl.argmax(rest, axis=0)  # the first one among equals
        ids = tl.where(place == n, best, ids)
        chosen = tl.where(place == n, tl.exp(tl.max(rest, axis=0) - largest), chosen)
        rest = tl.where(expert == best, lowest, rest)
    shares = chosen / (tl.sum(chosen, axis=0) if NORMALISE else total)
    at = token * NUM_ACTIVE + place
    tl.store(shares_ptr + at, shares, mask=place < NUM_ACTIVE)
    tl.store(ids_ptr + at, ids.to(tl.int64), mask=place < NUM_ACTIVE)


def route(logits: Tensor, num_active: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """See `Route`. Among equal logits the expert with the smaller index comes first."""
    num_tokens, num_experts = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    shares = torch.empty((num_tokens, num_active), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_tokens, num_active), dtype=torch.int64, device=logits.device)
    if num_tokens:
        _route_kernel[(num_tokens,)](
            logits,
            shares,
            ids,
            logits.stride(0),
            num_experts,
            NUM_ACTIVE=num_active,
            NORMALISE=normalise,
            BLOCK=triton.next_power_of_2(num_experts),
            ACTIVE_BLOCK=triton.next_power_of_2(num_active),
            num_warps=_NUM_WARPS,
        )
    return shares, ids


def variants() -> list[KernelVariant]:
    """See `compile_report`."""
    signature = {"logits_ptr": "*bf16", "shares_ptr": "*fp32", "ids_ptr": "*i64"}
    signature |= {"logits_stride": "i32:16", "num_experts": "i32:16"}
    constants = {"NUM_ACTIVE": 8, "NORMALISE": True, "BLOCK": 128, "ACTIVE_BLOCK": 8}
    return [KernelVariant("route Qwen3-30B-A3B", _route_kernel, signature, constants, _NUM_WARPS)]
