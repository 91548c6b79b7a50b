"""Decode attention over the paged KV pool in Triton: one new token per request, its keys split among programs.

Two stages, as in FlashDecoding (Dao et al. 2023): each program attends to a part of a request's keys, and a second
kernel combines the parts of each request. A decode step is limited by the bandwidth at which keys and values are read,
so the split keeps every multiprocessor reading for any mix of lengths.

The split is computed on the device, from the sequence lengths, once per step (`plan_decodes`): launches depend on
shapes only and can be captured in a CUDA graph. A request gets parts in proportion to its length. The list of parts
(*items*) has capacity for `target + B`; programs of unused items return at once.

    request   keys              items         target 4
    0         [........]        [....] [....]
    1         [...]             [...]
    2         [......]          [......]

The query heads of a KV head are the rows of one matmul, padded to 16, so keys are read once for all of them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, possibly-undefined"
# Triton kernels: arguments have no type annotations, and branches on `tl.constexpr` values are taken at compile time.

# Shapes: B requests, W items, Hq query heads, H KV heads on this rank, G = Hq // H, D head dim.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_combine import SPAN, combine
from .attention_tiles import (
    MIN_DOT,
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
from .kernel_variant import KernelVariant

_PROGRAMS_PER_SM: Final = 2
_PLAN_ITEMS: Final = 64
_PLAN_REQUESTS: Final = 128
_ITEM: Final = tl.constexpr(8)
"""Integers per item: request or -1, row, first key, end of the keys (exclusive), items of the request; rest unused."""
_SPAN: Final = tl.constexpr(SPAN)
_NUM_STAGES: Final = 5
"""Pipeline depth: two tiles are in flight after the loads of their slots. With two programs on a Hopper SM that is some
64 KB, twice the SM's share of memory bandwidth times latency."""
_TILE_BYTES: Final = (
    16384  # of keys, and of values; three stages of both fit twice into the shared memory of a Hopper SM
)
_MAX_KEYS: Final = 128


@triton.jit(do_not_specialize=["num_requests", "num_items", "target"])
def _plan_kernel(
    rows_ptr,
    seq_lens_ptr,
    items_ptr,
    spans_ptr,
    num_requests,
    num_items,
    target,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PLAN_ITEMS: tl.constexpr,
    PLAN_REQUESTS: tl.constexpr,
):
    item = tl.program_id(0) * PLAN_ITEMS + tl.arange(0, PLAN_ITEMS)
    lane = tl.arange(0, PLAN_REQUESTS)
    total = 0
    for start in range(0, num_requests, PLAN_REQUESTS):
        length = tl.load(seq_lens_ptr + start + lane, mask=start + lane < num_requests, other=0)
        total += tl.sum(_num_tiles(length, WINDOW, CHUNKED, BLOCK_N), axis=0)
    total = tl.maximum(total, 1)

    # The request of an item = number of requests that end at or before it. Also find the first item of that request.
    request = tl.zeros([PLAN_ITEMS], tl.int32)
    first_item = tl.zeros([PLAN_ITEMS], tl.int32)
    taken = 0
    for start in range(0, num_requests, PLAN_REQUESTS):
        inside = start + lane < num_requests
        length = tl.load(seq_lens_ptr + start + lane, mask=inside, other=0)
        parts = _num_parts(_num_tiles(length, WINDOW, CHUNKED, BLOCK_N), total, target)
        ends = taken + tl.cumsum(parts, axis=0)
        before = (ends[None, :] <= item[:, None]) & inside[None, :]
        request += tl.sum(before.to(tl.int32), axis=1)
        first_item = tl.maximum(first_item, tl.max(tl.where(before, ends[None, :], 0), axis=1))
        if tl.program_id(0) == 0:
            tl.store(spans_ptr + _SPAN * (start + lane), ends - parts, mask=inside)
            tl.store(spans_ptr + _SPAN * (start + lane) + 1, parts, mask=inside)
            tl.store(spans_ptr + _SPAN * (start + lane) + 2, 1, mask=inside)
        taken += tl.sum(parts, axis=0)

    used = item < taken
    length = tl.load(seq_lens_ptr + request, mask=used, other=0)
    row = tl.load(rows_ptr + request, mask=used, other=0).to(tl.int32)
    tiles = _num_tiles(length, WINDOW, CHUNKED, BLOCK_N)
    parts = tl.maximum(_num_parts(tiles, total, target), 1)
    first = _first_key(length, WINDOW, CHUNKED)
    part = item - first_item
    begin = tl.maximum((first // BLOCK_N + part * tiles // parts) * BLOCK_N, first)
    end = tl.minimum((first // BLOCK_N + (part + 1) * tiles // parts) * BLOCK_N, length)
    at = items_ptr + item * _ITEM
    exists = item < num_items
    tl.store(at, tl.where(used, request, -1), mask=exists)
    tl.store(at + 1, row, mask=exists)
    tl.store(at + 2, begin, mask=exists)
    tl.store(at + 3, end, mask=exists)
    tl.store(at + 4, parts, mask=exists)


@triton.jit
def _first_key(length, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """The first key that the last query sees."""
    if WINDOW == 0:
        return length * 0
    if CHUNKED:
        return tl.maximum(length - 1, 0) // WINDOW * WINDOW
    return tl.maximum(length - WINDOW, 0)


@triton.jit
def _num_tiles(length, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tiles of keys that the query sees, in whole or in part."""
    return (length + BLOCK_N - 1) // BLOCK_N - _first_key(length, WINDOW, CHUNKED) // BLOCK_N


@triton.jit
def _num_parts(tiles, total, target):
    """Items of a request: its share of the target, at least one, and each item has at least one tile."""
    return tl.minimum(tl.maximum((tiles.to(tl.int64) * target // total).to(tl.int32), 1), tiles)


@triton.jit
def _attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    items_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    sinks_ptr,
    q_stride,
    q_head_stride,
    table_stride,
    scale,
    CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WHOLE_PAGES: tl.constexpr,
    KV: tl.constexpr,
):
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    request = tl.load(items_ptr + item * _ITEM)
    if request < 0:
        return
    row = tl.load(items_ptr + item * _ITEM + 1).to(tl.int64)
    begin = tl.load(items_ptr + item * _ITEM + 2)
    end = tl.load(items_ptr + item * _ITEM + 3)
    parts = tl.load(items_ptr + item * _ITEM + 4)

    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    head = kv_head * GROUP + g
    inside_q = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    q_at = request.to(tl.int64) * q_stride + head * q_head_stride
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=inside_q, other=0.0)
    if KV > 0:
        q = q.to(tl.float16)
    table_ptr += row * table_stride
    kv_at = kv_head * HEAD_DIM + d

    highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    mixed = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(begin // BLOCK_N * BLOCK_N, end, BLOCK_N):
        seen = (start + n >= begin) & (start + n < end)
        slot = slots_of(table_ptr, start, end, BLOCK_N, WHOLE_PAGES) * (NUM_KV * HEAD_DIM)
        at = slot[:, None] + kv_at[None, :]
        inside = seen[:, None] & (d < HEAD_DIM)[None, :]
        scores = scores_of(q, k_ptr, at, inside, scale, CAP, KV)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        highest, total, mixed = mixed_in(scores, v_ptr, at, inside, highest, total, mixed, q.dtype, False, KV)

    if parts == 1:
        mixed = finished(mixed, highest, total, sinks_ptr, head, g < GROUP, HAS_SINKS)
        out_at = request.to(tl.int64) * (NUM_KV * GROUP * HEAD_DIM) + head * HEAD_DIM
        tl.store(out_ptr + out_at[:, None] + d[None, :], mixed.to(out_ptr.dtype.element_ty), mask=inside_q)
    else:
        mixed = mixed / total[:, None]
        part_at = item.to(tl.int64) * (NUM_KV * GROUP) + head
        tl.store(partial_ptr + part_at[:, None] * HEAD_DIM + d[None, :], mixed, mask=inside_q)
        tl.store(lse_ptr + part_at, highest + tl.log2(total), mask=g < GROUP)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The split of a step's requests, for the layers of one window.

    Attributes:
        items: [W, 8] int32, see `_ITEM`.
        spans: [B, 3] int32: where the partial results of each request are; see `attention_combine`.
        partial: [W, Hq, D] float32, and
        lse: [W, Hq] float32: written by the first stage, read by the second; every layer overwrites them.
        keys: keys per tile.
    """

    items: Tensor
    spans: Tensor
    partial: Tensor
    lse: Tensor
    keys: int


def keys_of_tile(shape: HeadShape, kv_dtype: torch.dtype) -> int:
    """Keys per tile: as many as fit into `_TILE_BYTES`; few in float32, which has no tensor cores and would spill."""
    if kv_dtype == torch.float32 and shape.padded_dim >= 128:
        return MIN_DOT
    keys = _TILE_BYTES // (shape.padded_dim * kv_dtype.itemsize)
    return max(MIN_DOT, min(keys, _MAX_KEYS))


def plan_decodes(
    shape: HeadShape,
    rows: Tensor,
    seq_lens: Tensor,
    windows: Sequence[int | None],
    kv_dtype: torch.dtype,
    num_sms: int,
    *,
    chunked: bool = False,
) -> dict[int | None, DecodePlan]:
    """Split the requests of a step so that all multiprocessors get equal work, for each window of the layers.

    Args:
        rows: [B] int32 or int64, device; B at least 1.
        seq_lens: [B] int32, device, at least 1.
        num_sms: multiprocessors of the GPU.
        chunked: windows are chunks, see `AttentionForm`.
    """
    num_requests, device = len(rows), rows.device
    # A batch that fills the GPU needs no more parts, but a request far longer than the others must still be split.
    target = max(-(-_PROGRAMS_PER_SM * num_sms // shape.num_kv_heads), -(-num_requests // 2))
    num_items = num_requests + target
    partial = torch.empty((num_items, shape.num_heads, shape.head_dim), dtype=torch.float32, device=device)
    lse = torch.empty((num_items, shape.num_heads), dtype=torch.float32, device=device)
    keys = keys_of_tile(shape, kv_dtype)
    plans = {}
    for window in windows:
        items = torch.empty((num_items, _ITEM.value), dtype=torch.int32, device=device)
        spans = torch.empty((num_requests, _SPAN.value), dtype=torch.int32, device=device)
        _plan_kernel[(-(-num_items // _PLAN_ITEMS),)](
            rows,
            seq_lens,
            items,
            spans,
            num_requests,
            num_items,
            target,
            WINDOW=window or 0,
            CHUNKED=chunked,
            BLOCK_N=keys,
            PLAN_ITEMS=_PLAN_ITEMS,
            PLAN_REQUESTS=_PLAN_REQUESTS,
            num_warps=4,
        )
        plans[window] = DecodePlan(items, spans, partial, lse, keys)
    return plans


def attend_decode(inputs: AttentionInputs, plan: DecodePlan) -> None:
    """Attention of one token per request: T is B."""
    inputs.launch(
        _attend_kernel,
        plan.items,
        plan.partial,
        plan.lse,
        plan.keys,
        BLOCK_G=_padded_group(inputs.shape),
        num_warps=4,
        num_stages=_NUM_STAGES,
    )
    combine(plan.partial, plan.lse, plan.spans, inputs.out, inputs.sinks)


def variants() -> list[KernelVariant]:
    found = [
        KernelVariant(
            "plan_decodes",
            _plan_kernel,
            {
                "rows_ptr": "*i64",
                "seq_lens_ptr": "*i32",
                "items_ptr": "*i32",
                "spans_ptr": "*i32",
                "num_requests": "i32",
                "num_items": "i32",
                "target": "i32",
            },
            {
                "WINDOW": 512,
                "CHUNKED": False,
                "BLOCK_N": 64,
                "PLAN_ITEMS": _PLAN_ITEMS,
                "PLAN_REQUESTS": _PLAN_REQUESTS,
            },
        ),
    ]
    for variant in VARIANTS:
        keys = keys_of_tile(variant.shape, variant.kv_dtype)
        found.append(
            KernelVariant(
                f"attend_decode {variant.name}",
                _attend_kernel,
                variant.pointers | {"items_ptr": "*i32"} | STRIDES,
                {"BLOCK_G": _padded_group(variant.shape), **variant.constants(keys)},
                num_warps=4,
                num_stages=_NUM_STAGES,
                min_arch=variant.min_arch,
            )
        )
    return found


def _padded_group(shape: HeadShape) -> int:
    return max(MIN_DOT, next_power_of_2(shape.group))
