"""The second stage of split-KV attention: combine the partial results of a token.

A partial result is the attention output over its own keys, normalized by its own softmax sum, and the logarithm of that
sum (LSE).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, possibly-undefined"
# Triton kernels: arguments have no type annotations, and branches on `tl.constexpr` values are taken at compile time.

# Shapes: T tokens, P partial results of all tokens, Hq query heads, D head dim.

from __future__ import annotations

import math
from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from .attention_tiles import next_power_of_2
from .kernel_variant import KernelVariant

SPAN: Final = 3
"""Values that locate the partial results of a token: index of the first, how many, and the stride between them."""
_SPAN: Final = tl.constexpr(SPAN)
_LOG2_E: Final = tl.constexpr(math.log2(math.e))
_PARTS: Final = 16  # partial results that are read at a time


@triton.jit
def _combine_kernel(
    partial_ptr,
    lse_ptr,
    spans_ptr,
    out_ptr,
    sinks_ptr,
    HAS_SINKS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    head = tl.program_id(0)
    token = tl.program_id(1)
    first = tl.load(spans_ptr + _SPAN * token).to(tl.int64)
    parts = tl.load(spans_ptr + _SPAN * token + 1)
    apart = tl.load(spans_ptr + _SPAN * token + 2)
    if parts < 2:
        return
    d = tl.arange(0, BLOCK_D)
    s = tl.arange(0, BLOCK_S)
    if HAS_SINKS:
        highest = tl.load(sinks_ptr + head) * _LOG2_E
        total = 1.0
    else:
        highest = float("-inf")
        total = 0.0
    mixed = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, parts, BLOCK_S):
        inside = start + s < parts
        at = (first + (start + s) * apart) * NUM_HEADS + head
        lse = tl.load(lse_ptr + at, mask=inside, other=float("-inf"))
        part = tl.load(
            partial_ptr + at[:, None] * HEAD_DIM + d[None, :],
            mask=inside[:, None] & (d < HEAD_DIM)[None, :],
            other=0.0,
        )
        new_highest = tl.maximum(highest, tl.max(lse, axis=0))
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # a token may see no key of a part
        fading = tl.exp2(highest - shift)
        weights = tl.exp2(lse - shift)
        total = total * fading + tl.sum(weights, axis=0)
        mixed = mixed * fading + tl.sum(weights[:, None] * part, axis=0)
        highest = new_highest
    out_at = (token.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
    tl.store(out_ptr + out_at + d, (mixed / total).to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)


def combine(partial: Tensor, lse: Tensor, spans: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
    """Combine the partial results of tokens; a token with a single part has its final output already.

    Args:
        partial: [P, Hq, D] float32.
        lse: [P, Hq] float32, logarithms to the base 2. Where a token sees no key of a part, lse is -inf and `partial`
            is 0.
        spans: [T, 3] int32, see `SPAN`.
        out: [T or more, Hq * D], contiguous.
        sinks: [Hq] float32, see `AttentionForm`; they join the sums here, not in the parts.
    """
    _, num_heads, head_dim = partial.shape
    _combine_kernel[(num_heads, len(spans))](
        partial,
        lse,
        spans,
        out,
        lse if sinks is None else sinks,
        HAS_SINKS=sinks is not None,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=next_power_of_2(head_dim),
        BLOCK_S=_PARTS,
        num_warps=1 if head_dim <= 64 else 4,
    )


def variants() -> list[KernelVariant]:
    pointers = {
        "partial_ptr": "*fp32",
        "lse_ptr": "*fp32",
        "spans_ptr": "*i32",
        "out_ptr": "*bf16",
        "sinks_ptr": "*fp32",
    }
    return [
        KernelVariant(
            f"combine bf16 dim {head_dim}{' sinks' if has_sinks else ''}",
            _combine_kernel,
            pointers,
            {
                "HAS_SINKS": has_sinks,
                "NUM_HEADS": 32,
                "HEAD_DIM": head_dim,
                "BLOCK_D": next_power_of_2(head_dim),
                "BLOCK_S": _PARTS,
            },
            num_warps=1 if head_dim <= 64 else 4,
        )
        for head_dim, has_sinks in ((64, False), (96, False), (128, False), (256, False), (64, True))
    ]
