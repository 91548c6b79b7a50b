"""The experts of a mixture in Triton: four launches for any routing, without reading anything back to the host.

    count      of steps with many rows, first: how many rows each expert has
    align      rows (one token for one of its experts) sorted by expert, each expert's rows padded to whole blocks
    gate, up   a block of rows times the weights of its expert, SiLU(gate) * up
    down       the same rows times the second weights
    combine    each token's rows, weighted and added up

A block of rows has one expert, so its matmul is one tile of an ordinary GEMM. Only the device knows the number of
blocks: the grid has the maximum number of programs, and programs without a block return at once.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, possibly-undefined"
# Triton kernels: arguments have no type annotations, and branches on `tl.constexpr` values are taken at compile time.

# Shapes: T tokens, E experts, k active experts of a token, M = T * k rows, K width of the model, N width of an expert.

from __future__ import annotations

import itertools
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....models.spec.experts_spec import ClampedSwiGLU
from ...ops.deltas import ExpertChanges
from ...ops.experts import ExpertSource, ExpertWeights
from .. import plain
from .kernel_variant import KernelVariant

_CHUNK: Final = 1024  # rows that a program of `align` reads at a time
_COUNTED_FROM: Final = 4 * _CHUNK  # rows that are counted once, and not by each expert's program of `align`
_COMBINE_BLOCK: Final = 512


class _Tile(NamedTuple):
    """Tile of a GEMM: rows, outputs, and inputs per step; the values are tuned together."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


# Few rows per expert: bandwidth of the weights is the limit, so the tile has the minimum rows of tensor cores.
_LOW: Final = _Tile(16, 64, 128, 4, 3)
_MIDDLE: Final = _Tile(32, 64, 64, 4, 4)
_HIGH: Final = _Tile(128, 64, 64, 8, 3)


# Specialization on row counts would compile kernels while serving: for 1, for multiples of 16, and for others.
@triton.jit(do_not_specialize=["num_rows"])
def _count_kernel(
    expert_ids_ptr,
    counts_ptr,  # [BINS] int32, zeros
    num_rows,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program per chunk of rows."""
    row = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    bin_ = tl.arange(0, BINS)
    ids = tl.load(expert_ids_ptr + row, mask=row < num_rows, other=NUM_EXPERTS).to(tl.int32)
    counts = tl.histogram(ids, BINS)  # bin NUM_EXPERTS: rows past the end
    tl.atomic_add(counts_ptr + bin_, counts, mask=(bin_ < NUM_EXPERTS) & (counts > 0))


@triton.jit(do_not_specialize=["num_rows"])
def _align_kernel(
    expert_ids_ptr,
    counts_ptr,
    sorted_rows_ptr,
    block_expert_ptr,
    num_blocks_ptr,
    num_rows,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """One program per expert: counts the rows of all experts to find where its own begin, then lists its own rows."""
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    bin_ = tl.arange(0, BINS)
    if COUNTED:
        counts = tl.load(counts_ptr + bin_)
    else:
        counts = tl.zeros([BINS], dtype=tl.int32)
        for start in range(0, num_rows, CHUNK):
            row = start + lane
            ids = tl.load(expert_ids_ptr + row, mask=row < num_rows, other=NUM_EXPERTS).to(tl.int32)
            counts += tl.histogram(ids, BINS)  # bin NUM_EXPERTS: rows past the end
    blocks = tl.where(bin_ < NUM_EXPERTS, (counts + ROWS - 1) // ROWS, 0)
    first_block = tl.sum(tl.where(bin_ < expert, blocks, 0), axis=0)
    my_blocks = tl.sum(tl.where(bin_ == expert, blocks, 0), axis=0)
    if expert == NUM_EXPERTS - 1:
        tl.store(num_blocks_ptr, first_block + my_blocks)

    place = first_block * ROWS
    for start in range(0, num_rows, CHUNK):
        row = start + lane
        ids = tl.load(expert_ids_ptr + row, mask=row < num_rows, other=NUM_EXPERTS).to(tl.int32)
        mine = (ids == expert).to(tl.int32)
        tl.store(sorted_rows_ptr + place + tl.cumsum(mine, axis=0) - 1, row, mask=mine != 0)
        place += tl.sum(mine, axis=0)
        tl.store(
            block_expert_ptr + first_block + row, expert, mask=row < my_blocks
        )  # at most as many blocks as rows
    filler = place + tl.arange(0, ROWS)
    tl.store(sorted_rows_ptr + filler, num_rows, mask=filler < (first_block + my_blocks) * ROWS)


@triton.jit(do_not_specialize=["max_blocks", "num_rows", "rows_per_x"])
def _product_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    sorted_rows_ptr,
    block_expert_ptr,
    num_blocks_ptr,
    max_blocks,
    num_rows,
    x_stride,
    num_outputs,
    num_inputs,
    rows_per_x,
    bias_ptr,
    shares_ptr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    GATE_LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALES: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """A block of rows times a tile of its expert's weight [outputs, inputs]; GATED: times two tiles, gate and up."""
    # Blocks vary fastest: neighboring programs read the same tile of weights, which is the larger operand.
    block = tl.program_id(0) % max_blocks
    if block >= tl.load(num_blocks_ptr):
        return
    output = (tl.program_id(0) // max_blocks) * OUTPUTS + tl.arange(0, OUTPUTS)
    expert = tl.load(block_expert_ptr + block).to(tl.int64)
    row = tl.load(sorted_rows_ptr + block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    row_exists = row < num_rows
    output_exists = output < num_outputs
    precision: tl.constexpr = "ieee" if EXACT else "tf32"

    input_ = tl.arange(0, INPUTS)
    x_at = x_ptr + (row // rows_per_x)[:, None] * x_stride + input_[None, :]
    outputs = tl.cast(num_outputs, tl.int64)  # an argument of value 1 becomes a constant, which has no `to`
    expert_size = (2 if GATED else 1) * outputs * num_inputs
    weight_at = (
        weight_ptr + expert * expert_size + output[None, :].to(tl.int64) * num_inputs + input_[:, None]
    )
    up_at = weight_at + outputs * num_inputs
    sums = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
    up_sums = tl.zeros([ROWS, OUTPUTS], dtype=tl.float32)
    for start in range(0, num_inputs, INPUTS):
        input_exists = input_ < num_inputs - start
        x = tl.load(x_at + start, mask=row_exists[:, None] & input_exists[None, :], other=0.0)
        in_weight = input_exists[:, None] & output_exists[None, :]
        weight = tl.load(weight_at + start, mask=in_weight, other=0.0)
        sums = tl.dot(x, weight, sums, input_precision=precision)
        if GATED:
            up = tl.load(up_at + start, mask=in_weight, other=0.0)
            up_sums = tl.dot(x, up, up_sums, input_precision=precision)
    if SCALES:  # a factor of the row of x, hence before the biases
        share = tl.load(shares_ptr + row, mask=row_exists, other=0.0)[:, None]
        sums *= share
        up_sums *= share
    if HAS_BIAS:
        bias_at = bias_ptr + expert * ((2 if GATED else 1) * outputs) + output
        sums += tl.load(bias_at, mask=output_exists, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up_sums += tl.load(bias_at + outputs, mask=output_exists, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if CLAMPED:
            sums = tl.where(sums > GATE_LIMIT, GATE_LIMIT, sums)
            up_sums = tl.where(up_sums > LIMIT, LIMIT, up_sums)
            up_sums = tl.where(up_sums < -LIMIT, -LIMIT, up_sums) + OFFSET
        sums = sums / (1.0 + tl.exp(-ALPHA * sums)) * up_sums
    out_at = out_ptr + row[:, None] * num_outputs + output[None, :]
    tl.store(out_at, sums.to(out_ptr.dtype.element_ty), mask=row_exists[:, None] & output_exists[None, :])


@triton.jit
def _combine_kernel(
    rows_ptr,
    shares_ptr,
    out_ptr,
    width,
    NUM_ACTIVE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for n in tl.static_range(NUM_ACTIVE):
        row = token * NUM_ACTIVE + n
        one = tl.load(rows_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(shares_ptr + row) * one if WEIGHTED else one
    tl.store(out_ptr + token * width + column, total.to(out_ptr.dtype.element_ty), mask=inside)


class TritonExperts:
    """`ExpertWeights` in their original layout: [E, 2N, K] and [E, K, N]."""

    def __init__(
        self,
        gate_up: Tensor,
        down: Tensor,
        clamp: ClampedSwiGLU | None = None,
        biases: tuple[Tensor, Tensor] | None = None,
        *,
        scales_inputs: bool = False,
    ) -> None:
        """Take the weights; `clamp`, `biases`, `scales_inputs`: see `ExpertSource`."""
        self._gate_up = gate_up.contiguous()
        self._down = down.contiguous()
        self._clamp = clamp
        self._scales_inputs = scales_inputs
        self._gate_up_bias: Tensor | None = None
        self._down_bias: Tensor | None = None
        if biases is not None:
            self._gate_up_bias, self._down_bias = biases

    def warm_up(self) -> None:
        """Compile for every tile size (seconds on a new machine), so that no request waits for it later."""
        x = torch.zeros((1, self._down.shape[1]), dtype=self._down.dtype, device=self._down.device)
        expert_ids = torch.zeros((1, 1), dtype=torch.int64, device=x.device)
        shares = torch.zeros((1, 1), device=x.device)
        for tile in _tiles(x.dtype.itemsize):
            self._rows(x, shares, expert_ids, tile)
            _align(expert_ids, len(self._down), tile.rows, counted=True)

    def __call__(
        self, x: Tensor, shares: Tensor, expert_ids: Tensor, changes: ExpertChanges | None = None
    ) -> Tensor:
        assert changes is None, "experts that adapters change are computed by torch"
        num_tokens, width = x.shape
        num_active = expert_ids.shape[1]
        out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
        if not num_tokens:
            return out
        tile = _tile(num_tokens * num_active / len(self._down), x.dtype.itemsize)
        shares = shares.contiguous()
        rows = self._rows(x.contiguous(), shares, expert_ids.contiguous(), tile)
        _combine_kernel[(num_tokens, triton.cdiv(width, _COMBINE_BLOCK))](
            rows,
            shares,
            out,
            width,
            NUM_ACTIVE=num_active,
            WEIGHTED=not self._scales_inputs,
            BLOCK=_COMBINE_BLOCK,
            num_warps=2,
        )
        return out

    def _rows(self, x: Tensor, shares: Tensor, expert_ids: Tensor, tile: _Tile) -> Tensor:
        """The output of each token's experts, one row per (token, expert): [M, K]."""
        blocks = _align(expert_ids, len(self._down), tile.rows)
        num_rows = expert_ids.numel()
        hidden = torch.empty((num_rows, self._down.shape[2]), dtype=x.dtype, device=x.device)
        rows = torch.empty((num_rows, x.shape[1]), dtype=x.dtype, device=x.device)
        gated = _Epilogue(True, self._gate_up_bias, self._clamp, shares if self._scales_inputs else None)
        _product(x, self._gate_up, hidden, blocks, tile, expert_ids.shape[1], gated)
        _product(hidden, self._down, rows, blocks, tile, 1, _Epilogue(False, self._down_bias))
        return rows


class _Epilogue(NamedTuple):
    """The part of a product after the sums: the bias of each expert, and the activation of gate and up.

    `shares`: [M] float32, factors of the rows of x; None: 1.
    """

    gated: bool
    bias: Tensor | None = None
    clamp: ClampedSwiGLU | None = None
    shares: Tensor | None = None

    def constants(self) -> dict[str, Any]:
        return {
            "GATED": self.gated,
            "HAS_BIAS": self.bias is not None,
            "CLAMPED": self.clamp is not None,
            "ALPHA": 1.0 if self.clamp is None else self.clamp.alpha,
            "LIMIT": 0.0 if self.clamp is None else self.clamp.limit,
            "GATE_LIMIT": 0.0 if self.clamp is None else self.clamp.gate_limit,
            "OFFSET": 0.0 if self.clamp is None else self.clamp.offset,
            "SCALES": self.shares is not None,
        }


class _Blocks(NamedTuple):
    """Rows in blocks of one expert each.

    Attributes:
        sorted_rows: [max_blocks * rows of a block] int32; M marks padding.
        experts: [max_blocks] int32.
        num: [1] int32, number of blocks; entries past it in the other arrays are undefined.
        max_blocks: upper bound of the number of blocks for any routing.
        num_rows: M.
    """

    sorted_rows: Tensor
    experts: Tensor
    num: Tensor
    max_blocks: int
    num_rows: int


def _align(expert_ids: Tensor, num_experts: int, block_rows: int, *, counted: bool = False) -> _Blocks:
    num_rows, device = expert_ids.numel(), expert_ids.device
    counted = counted or num_rows >= _COUNTED_FROM
    constants = {
        "NUM_EXPERTS": num_experts,
        "BINS": triton.next_power_of_2(num_experts + 1),
        "CHUNK": _CHUNK,
    }
    # Every expert may have one partial block.
    max_blocks = min(num_rows, num_rows // block_rows + num_experts)
    sorted_rows = torch.empty(max_blocks * block_rows, dtype=torch.int32, device=device)
    experts = torch.empty(max_blocks, dtype=torch.int32, device=device)
    num = torch.empty(1, dtype=torch.int32, device=device)
    counts = num  # not read
    if counted:
        counts = torch.zeros(constants["BINS"], dtype=torch.int32, device=device)
        _count_kernel[(triton.cdiv(num_rows, _CHUNK),)](expert_ids, counts, num_rows, **constants)
    _align_kernel[(num_experts,)](
        expert_ids, counts, sorted_rows, experts, num, num_rows, ROWS=block_rows, COUNTED=counted, **constants
    )
    return _Blocks(sorted_rows, experts, num, max_blocks, num_rows)


def _product(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    blocks: _Blocks,
    tile: _Tile,
    rows_per_x: int,
    epilogue: _Epilogue,
) -> None:
    """`rows_per_x`: number of consecutive rows that read the same row of x."""
    num_outputs = out.shape[1]
    _product_kernel[(blocks.max_blocks * triton.cdiv(num_outputs, tile.outputs),)](
        x,
        weight,
        out,
        *blocks,
        x.stride(0),
        num_outputs,
        x.shape[1],
        rows_per_x,
        out if epilogue.bias is None else epilogue.bias,
        out if epilogue.shares is None else epilogue.shares,
        **epilogue.constants(),
        EXACT=x.dtype == torch.float32,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        INPUTS=tile.inputs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _tile(rows_each: float, item_bytes: int) -> _Tile:
    """Chosen by the mean number of rows per expert; the host does not know the actual numbers."""
    low, middle, high = _tiles(item_bytes)
    return low if rows_each <= 16 else middle if rows_each <= 64 else high


def _tiles(item_bytes: int) -> tuple[_Tile, _Tile, _Tile]:
    """For few rows per expert, for some, for many."""
    if item_bytes <= 2:
        return _LOW, _MIDDLE, _HIGH
    # Wider elements: fewer fit into registers and shared memory.
    low, middle = (tile._replace(inputs=tile.inputs // 2) for tile in (_LOW, _MIDDLE))
    return low, middle, middle


def pack_experts(experts: ExpertSource) -> ExpertWeights:
    """Later layers of the same shapes find the kernels compiled; experts that adapters may change are in torch."""
    if experts.is_adapted:
        return plain.pack_experts(experts)
    packed = TritonExperts(
        *experts.stacked(), experts.clamp, experts.biases(), scales_inputs=experts.scales_inputs
    )
    packed.warm_up()
    return packed


def variants() -> list[KernelVariant]:
    """Shapes of Qwen3-30B-A3B: 128 experts, 8 active, 2048 and 768 wide."""
    count = {"expert_ids_ptr": "*i64", "counts_ptr": "*i32", "num_rows": "i32"}
    align = {**count, "sorted_rows_ptr": "*i32", "block_expert_ptr": "*i32", "num_blocks_ptr": "*i32"}
    constants: dict[str, Any] = {"NUM_EXPERTS": 128, "BINS": 256, "CHUNK": _CHUNK}
    found = [KernelVariant("experts count", _count_kernel, count, constants)]
    found += [
        KernelVariant(
            f"experts align{' counted' if counted else ''}",
            _align_kernel,
            align,
            {**constants, "ROWS": 16, "COUNTED": counted},
        )
        for counted in (False, True)
    ]
    combine = {"rows_ptr": "*bf16", "shares_ptr": "*fp32", "out_ptr": "*bf16", "width": "i32:16"}
    constants = {"NUM_ACTIVE": 8, "WEIGHTED": True, "BLOCK": _COMBINE_BLOCK}
    found.append(KernelVariant("experts combine", _combine_kernel, combine, constants, num_warps=2))
    for dtype, item_bytes in (("bf16", 2), ("fp32", 4)):
        product = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr", "bias_ptr", "shares_ptr"), f"*{dtype}")
        product |= dict.fromkeys(("sorted_rows_ptr", "block_expert_ptr", "num_blocks_ptr"), "*i32")
        product |= dict.fromkeys(("max_blocks", "num_rows", "rows_per_x"), "i32")
        product |= dict.fromkeys(("x_stride", "num_outputs", "num_inputs"), "i32:16")
        for tile, gated in itertools.product(sorted(set(_tiles(item_bytes))), (False, True)):
            constants = {**_Epilogue(gated).constants(), "EXACT": dtype == "fp32"}
            constants |= {"ROWS": tile.rows, "OUTPUTS": tile.outputs, "INPUTS": tile.inputs}
            name = f"experts {dtype} {'gate and up' if gated else 'down'}, {tile.rows} rows"
            found.append(
                KernelVariant(name, _product_kernel, product, constants, tile.num_warps, tile.num_stages)
            )
    return found
