"""Prefill attention over the paged KV pool in Triton: many new tokens per request, after a cached prefix of any length.

A program takes a block of one request's new tokens and all query heads of one KV head, and loops over the keys that
they see; keys outside the causal triangle or the window are never read. The rows of its tiles are (token, head) pairs,
so tiles are filled for any group size: 128 rows are 32 tokens of 4 heads, or 42 tokens of 3 heads and two unused rows.

    row      0   1   2   3   4   5  ...          group 3
    token    0   0   0   1   1   1
    head     0   1   2   0   1   2

Where the blocks are too few to fill a GPU (a short question after a long conversation), their keys are split among
several programs, as in decode attention.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, possibly-undefined"
# Triton kernels: arguments have no type annotations, and branches on `tl.constexpr` values are taken at compile time.

# Shapes: T new tokens in the batch, NB blocks (each some tokens of a request and a part of their keys), P partial
# results of all tokens, Hq query heads, H KV heads on this rank, G = Hq // H, D head dim.

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from ....models.spec.model_spec import LayerView
from .attention_combine import combine
from .attention_tiles import (
    STRIDES,
    VARIANTS,
    AttentionInputs,
    HeadShape,
    finished,
    mixed_in,
    next_power_of_2,
    scores_of,
    slots_of,
)
from .extend_cut import BLOCK_NUMBERS, ExtendCut
from .kernel_variant import KernelVariant

Int64s = npt.NDArray[np.int64]

_BLOCK: Final = tl.constexpr(BLOCK_NUMBERS)


class Tiling(NamedTuple):
    """Tile sizes of a program.

    Attributes:
        rows: (token, head) pairs.
        keys: keys per tile.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@triton.jit
def _extend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    blocks_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    sinks_ptr,
    q_stride,
    q_head_stride,
    table_stride,
    sees_ptr,
    scale,
    CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_IMAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WHOLE_PAGES: tl.constexpr,
    KV: tl.constexpr,
):
    kv_head = tl.program_id(0)
    block = tl.program_id(1)
    token = tl.load(blocks_ptr + block * _BLOCK).to(tl.int64)
    num_tokens = tl.load(blocks_ptr + block * _BLOCK + 1)
    first_position = tl.load(blocks_ptr + block * _BLOCK + 2)
    row = tl.load(blocks_ptr + block * _BLOCK + 3).to(tl.int64)
    begin = tl.load(blocks_ptr + block * _BLOCK + 4)
    end = tl.load(blocks_ptr + block * _BLOCK + 5)
    part = tl.load(blocks_ptr + block * _BLOCK + 6).to(tl.int64)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + m % GROUP
    inside_q = (m < num_tokens * GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    q_at = (token + m // GROUP) * q_stride + head * q_head_stride
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=inside_q, other=0.0)
    if KV > 0:
        q = q.to(tl.float16)
    # Unused rows take the mask of the last token; they are not stored.
    q_position = first_position + tl.minimum(m // GROUP, num_tokens - 1)
    sees_to = q_position + 1
    if HAS_IMAGES:
        sees_to = tl.load(sees_ptr + token + tl.minimum(m // GROUP, num_tokens - 1))
    table_ptr += row * table_stride
    kv_at = kv_head * HEAD_DIM + d

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    tile_start = begin // BLOCK_N * BLOCK_N
    # Without a window, every query sees all keys before the last whole tile that the first query sees: no mask there.
    for MASKED in tl.static_range(0 if WINDOW == 0 else 1, 2):
        stop = end if MASKED else tl.minimum((first_position + 1) // BLOCK_N * BLOCK_N, end)
        for start in range(tile_start, stop, BLOCK_N):
            position = start + tl.arange(0, BLOCK_N)
            slot = slots_of(table_ptr, start, end, BLOCK_N, WHOLE_PAGES) * (NUM_KV * HEAD_DIM)
            at = slot[:, None] + kv_at[None, :]
            inside = (d < HEAD_DIM)[None, :]
            if MASKED:
                inside = inside & ((position >= begin) & (position < end))[:, None]
            scores = scores_of(q, k_ptr, at, inside, scale, CAP, KV)
            if MASKED:
                seen = position[None, :] < sees_to[:, None]
                if WINDOW > 0:
                    first = q_position // WINDOW * WINDOW if CHUNKED else q_position - (WINDOW - 1)
                    seen = seen & (position[None, :] >= first[:, None])
                scores = tl.where(seen, scores, float("-inf"))
            highest, total, mixed = mixed_in(
                scores, v_ptr, at, inside, highest, total, mixed, q.dtype, MASKED, KV
            )
        tile_start = tl.maximum(tile_start, stop)
    if part < 0:
        out_at = ((token + m // GROUP) * (NUM_KV * GROUP) + head) * HEAD_DIM
        mixed = finished(mixed, highest, total, sinks_ptr, head, m < num_tokens * GROUP, HAS_SINKS)
        tl.store(out_ptr + out_at[:, None] + d[None, :], mixed.to(out_ptr.dtype.element_ty), mask=inside_q)
    else:
        part_at = (part + m // GROUP) * (NUM_KV * GROUP) + head
        mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]  # a row without keys gives zeros
        tl.store(partial_ptr + part_at[:, None] * HEAD_DIM + d[None, :], mixed, mask=inside_q)
        tl.store(lse_ptr + part_at, highest + tl.log2(total), mask=m < num_tokens * GROUP)


@dataclass(frozen=True, slots=True)
class ExtendPlan:
    """The blocks of a step, for the layers of one window.

    Attributes:
        blocks: [NB, 8] int32, device; see `BLOCK_NUMBERS`.
        spans: [T, 3] int32, device, for the tokens of extends: where their partial results are (`attention_combine`);
            [0, 3] if every token has one part.
        partial: [P, Hq, D] float32, and
        lse: [P, Hq] float32: the partial results; every layer overwrites them.
        tile_rows: rows per tile of a program.
        window: window of the layers.
        chunked: the window is a chunk, see `AttentionForm`.
        sees_to: [T] int32, device, see `BatchLayout`, never less than a token's own end; None: that is it.
    """

    blocks: Tensor
    spans: Tensor
    partial: Tensor
    lse: Tensor
    tile_rows: int
    window: int | None
    chunked: bool
    sees_to: Tensor | None = None


def rows_of_tile(shape: HeadShape, kv_dtype: torch.dtype, longest: int) -> int:
    """Rows per tile of a program: many rows keep the tensor cores busy; with short prompts most rows would be unused.

    Float8 gets few rows: its conversion takes registers, and its keys have half the bytes to read again.

    Args:
        longest: new tokens of the request that has most.
    """
    if shape.padded_dim > 256:
        return 32
    if kv_dtype == torch.float32 and shape.padded_dim >= 128:
        return max(32, next_power_of_2(shape.group))
    few = kv_dtype in (torch.float32, torch.float8_e4m3fn) or shape.padded_dim > 128
    if few or longest * shape.group <= 64:
        return 64
    return 128


def tiling(shape: HeadShape, dtype: torch.dtype, rows: int) -> Tiling:
    """Tile sizes that keep registers and shared memory within their limits (see `kernel_variant`).

    Args:
        dtype: dtype of the computation.
    """
    if dtype == torch.float32:  # no tensor cores
        return Tiling(rows, 16, num_warps=8, num_stages=1)
    if shape.padded_dim > 256:
        return Tiling(rows, 16, num_warps=8, num_stages=2)
    if shape.padded_dim > 128:
        return Tiling(rows, 32, num_warps=8, num_stages=2)
    return Tiling(rows, 64, num_warps=4 if rows == 64 else 8, num_stages=3)


def make_plan(
    shape: HeadShape,
    cut: ExtendCut,
    blocks: Tensor,
    spans: Tensor,
    tile_rows: int,
    view: LayerView,
    sees_to: Tensor | None = None,
) -> ExtendPlan:
    """The plan for `cut`, with its arrays on the device."""
    partial = blocks.new_empty((cut.num_parts, shape.num_heads, shape.head_dim), dtype=torch.float32)
    lse = blocks.new_empty((cut.num_parts, shape.num_heads), dtype=torch.float32)
    sees_to = None if view.causal_images else sees_to
    return ExtendPlan(blocks, spans, partial, lse, tile_rows, view.window, view.chunked, sees_to)


def attend_extend(inputs: AttentionInputs, plan: ExtendPlan) -> None:
    """Attention of the tokens in `plan`."""
    dtype = inputs.q.dtype if inputs.kv.k.dtype.itemsize > 1 else torch.float16
    tile = tiling(inputs.shape, dtype, plan.tile_rows)
    inputs.launch(
        _extend_kernel,
        plan.blocks,
        plan.partial,
        plan.lse,
        tile.keys,
        sees_ptr=plan.blocks if plan.sees_to is None else plan.sees_to,
        HAS_IMAGES=plan.sees_to is not None,
        WINDOW=plan.window or 0,
        CHUNKED=plan.chunked,
        BLOCK_M=tile.rows,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if len(plan.spans):
        combine(plan.partial, plan.lse, plan.spans, inputs.out, inputs.sinks)


def variants() -> list[KernelVariant]:
    found = []
    for variant in VARIANTS:
        shape, dtype, kv_dtype = variant.shape, variant.dtype, variant.kv_dtype
        of_gemma3 = shape == HeadShape(1, 4, 256, 16) and kv_dtype == torch.bfloat16
        for window, has_images in ((None, False), (512, False), *(((512, True),) if of_gemma3 else ())):
            tile = tiling(
                shape, dtype if kv_dtype.itemsize > 1 else torch.float16, rows_of_tile(shape, kv_dtype, 4096)
            )
            found.append(
                KernelVariant(
                    f"attend_extend {variant.name} window {window}" + " images" * has_images,
                    _extend_kernel,
                    variant.pointers | {"blocks_ptr": "*i32", "sees_ptr": "*i32"} | STRIDES,
                    {
                        "HAS_IMAGES": has_images,
                        "WINDOW": window or 0,
                        "CHUNKED": False,
                        "BLOCK_M": tile.rows,
                        **variant.constants(tile.keys),
                    },
                    num_warps=tile.num_warps,
                    num_stages=tile.num_stages,
                    max_stack_bytes=64,  # sm_80 spills some registers, sm_100 a few, sm_90 none but of fp8 at dim 256
                    min_arch=variant.min_arch,
                )
            )
    return found
