"""The second stage of attention whose keys were shared out among programs: the parts of a token are put together.

Each part holds what its keys gave, already divided by the sum of their weights, and the logarithm of that sum.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, possibly-undefined"
# Kernels are written in Triton's dialect, whose arguments have no types and whose branches are chosen at compile time.

# Shapes: T tokens, P parts of all tokens, Hq query heads, D head dim.

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from .attention_tiles import next_power_of_2
from .compile_report import KernelVariant

SPAN: Final = 3
"""Numbers that say where the parts of a token are: the first, how many, and how far they lie apart."""
_SPAN: Final = tl.constexpr(SPAN)
_PARTS: Final = 16  # read at a time


@triton.jit
def _combine_kernel(
    partial_ptr,
    lse_ptr,
    spans_ptr,
    out_ptr,
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
        shift = tl.where(
            new_highest == float("-inf"), 0.0, new_highest
        )  # parts in which a token sees nothing
        fading = tl.exp2(highest - shift)
        weights = tl.exp2(lse - shift)
        total = total * fading + tl.sum(weights, axis=0)
        mixed = mixed * fading + tl.sum(weights[:, None] * part, axis=0)
        highest = new_highest
    out_at = (token.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
    tl.store(out_ptr + out_at + d, (mixed / total).to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)


def combine(partial: Tensor, lse: Tensor, spans: Tensor, out: Tensor) -> None:
    """Put the parts of tokens together; a token with a single part is written already.

    Args:
        partial: [P, Hq, D] float32.
        lse: [P, Hq] float32, logarithms to the base 2; -inf of a part in which a token sees nothing, with zeros in
            `partial`.
        spans: [T, 3] int32, see `SPAN`.
        out: [T or more, Hq * D], contiguous.
    """
    _, num_heads, head_dim = partial.shape
    _combine_kernel[(num_heads, len(spans))](
        partial,
        lse,
        spans,
        out,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=next_power_of_2(head_dim),
        BLOCK_S=_PARTS,
        num_warps=1 if head_dim <= 64 else 4,
    )


def variants() -> list[KernelVariant]:
    """See `compile_report`."""
    pointers = {"partial_ptr": "*fp32", "lse_ptr": "*fp32", "spans_ptr": "*i32", "out_ptr": "*bf16"}
    return [
        KernelVariant(
            f"combine bf16 dim {head_dim}",
            _combine_kernel,
            pointers,
            {"NUM_HEADS": 32, "HEAD_DIM": head_dim, "BLOCK_D": next_power_of_2(head_dim), "BLOCK_S": _PARTS},
            num_warps=1 if head_dim <= 64 else 4,
        )
        for head_dim in (64, 96, 128, 256)
    ]
