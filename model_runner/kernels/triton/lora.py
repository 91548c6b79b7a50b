"""LoRA adapters in Triton: products with the matrices of each token's slot, by runs of equal slots (SGMV).

Two launches per layer. The first computes A x of each run, the inputs cut into some parts so that a decode occupies
enough multiprocessors; the second adds the parts in a fixed order, rounds, multiplies by B and adds to the outputs. The
grids depend on shapes only, and a program beyond the plan's number of runs ends at once: launches can be recorded, with
a plan that is written before each replay. The bits of a token do not depend on the other tokens.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, possibly-undefined"
# Triton kernels: arguments have no type annotations, and branches on `tl.constexpr` values are taken at compile time.

# Shapes: T tokens, K inputs, N outputs of all modules, M modules, S slots, R the largest rank, a power of 2.

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
import triton
import triton.language as tl

from ...adapter_runs import MAX_RUN_TOKENS
from ...ops.deltas import MakeDeltas
from ..plain_lora import SlotMatrices
from .kernel_variant import KernelVariant

if TYPE_CHECKING:
    from torch import Tensor

    from ...adapter_runs import AdapterRuns
    from ...ops.deltas import DeltaShape, PackedDelta

_LEAST: Final = 16
"""Rows, columns and inputs of a product, at least."""
_TILE_INPUTS: Final = 64
_TILE_OUTPUTS: Final = 64
_TILE_RANK: Final = 32
_TILE_NUMBERS: Final = 64 * 128
"""Elements of A in a tile, at most, for large ranks."""
_EXPAND_STAGES: Final = 1
"""Loads ahead of the products: few, or the parts of A x that are added up do not fit into the registers."""
_SPLIT_INPUTS: Final = 1024
"""Inputs of a part, at least."""
_MAX_SPLITS: Final = 8


@triton.jit
def _run(plan_ptr, ranks_ptr):
    """Slot, rank, first token and end of the program's run; rank 0: there is no such run, or no adapter in the slot."""
    run = tl.program_id(0)
    exists = run < tl.load(plan_ptr)
    slot = tl.load(plan_ptr + 1 + 3 * run, mask=exists, other=0)
    first = tl.load(plan_ptr + 2 + 3 * run, mask=exists, other=0)
    last = tl.load(plan_ptr + 3 + 3 * run, mask=exists, other=0)
    return slot, tl.load(ranks_ptr + slot, mask=exists, other=0), first, last


@triton.jit
def _shrink_kernel(
    x_ptr,  # [T, K]
    a_ptr,  # [S, M * R, K]
    low_ptr,  # [splits, T, M * R] float32
    plan_ptr,  # [1 + 3 * runs] int64
    ranks_ptr,  # [S] int32
    x_stride,
    num_inputs,
    inputs_per_split,
    num_tokens,
    NUM_MODULES: tl.constexpr,
    RANK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):
    module = tl.program_id(1)
    split = tl.program_id(2)
    slot, rank, first, last = _run(plan_ptr, ranks_ptr)
    if rank == 0:
        return
    token = first + tl.arange(0, TILE_TOKENS)
    row = tl.arange(0, RANK)
    a_at = a_ptr + ((slot * NUM_MODULES + module) * RANK + row) * num_inputs
    total = tl.zeros((TILE_TOKENS, RANK), dtype=tl.float32)
    start = split * inputs_per_split
    stop = tl.minimum(start + inputs_per_split, num_inputs)
    for begin in range(start, stop, TILE_INPUTS):
        column = begin + tl.arange(0, TILE_INPUTS)
        inside = column < stop
        x = tl.load(
            x_ptr + token[:, None] * x_stride + column[None, :],
            mask=(token < last)[:, None] & inside[None, :],
            other=0.0,
        )
        a = tl.load(a_at[None, :] + column[:, None], mask=(row < rank)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(x, a, total, input_precision="ieee")
    low_at = low_ptr + ((split * num_tokens + token[:, None]) * NUM_MODULES + module) * RANK + row[None, :]
    tl.store(low_at, total, mask=(token < last)[:, None])


@triton.jit
def _expand_kernel(
    low_ptr,  # [splits, T, M * R] float32
    b_ptr,  # [S, N, R]
    y_ptr,  # [T, N]
    plan_ptr,
    ranks_ptr,
    tiles_ptr,  # [tiles, 3] int32: module, first output, end of the module's outputs
    width,
    num_tokens,
    NUM_MODULES: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_RANK: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
):
    tile = tl.program_id(1)
    slot, rank, first, last = _run(plan_ptr, ranks_ptr)
    if rank == 0:
        return
    module = tl.load(tiles_ptr + 3 * tile)
    output = tl.load(tiles_ptr + 3 * tile + 1) + tl.arange(0, TILE_OUTPUTS)
    inside = output < tl.load(tiles_ptr + 3 * tile + 2)
    token = first + tl.arange(0, TILE_TOKENS)
    change = tl.zeros((TILE_TOKENS, TILE_OUTPUTS), dtype=tl.float32)
    for begin in range(0, rank, TILE_RANK):
        row = begin + tl.arange(0, TILE_RANK)
        low_at = low_ptr + (token[:, None] * NUM_MODULES + module) * RANK + row[None, :]
        low = tl.zeros((TILE_TOKENS, TILE_RANK), dtype=tl.float32)
        for split in tl.static_range(SPLITS):
            low += tl.load(
                low_at + split * num_tokens * NUM_MODULES * RANK, mask=(token < last)[:, None], other=0.0
            )
        b = tl.load(
            b_ptr + (slot * width + output)[None, :] * RANK + row[:, None],
            mask=inside[None, :] & (row < rank)[:, None],
            other=0.0,
        )
        change = tl.dot(low.to(b_ptr.dtype.element_ty), b, change, input_precision="ieee")
    y_at = y_ptr + token[:, None] * width + output[None, :]
    mask = (token < last)[:, None] & inside[None, :]
    y = tl.load(y_at, mask=mask, other=0.0).to(tl.float32) + change
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _embed_kernel(
    table_ptr,  # [S, tokens of the vocabulary, R]
    ids_ptr,  # [T] int64
    b_ptr,  # [S, N, R]
    y_ptr,  # [T, N]
    plan_ptr,
    ranks_ptr,
    width,
    vocab_size,
    RANK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
):
    slot, rank, first, last = _run(plan_ptr, ranks_ptr)
    if rank == 0:
        return
    output = tl.program_id(1) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    inside = output < width
    token = first + tl.arange(0, TILE_TOKENS)
    row = tl.arange(0, RANK)
    ids = tl.load(ids_ptr + token, mask=token < last, other=0)
    low = tl.load(
        table_ptr + (slot * vocab_size + ids)[:, None] * RANK + row[None, :],
        mask=(token < last)[:, None] & (row < rank)[None, :],
        other=0.0,
    )
    b = tl.load(
        b_ptr + (slot * width + output)[None, :] * RANK + row[:, None],
        mask=inside[None, :] & (row < rank)[:, None],
        other=0.0,
    )
    y_at = y_ptr + token[:, None] * width + output[None, :]
    mask = (token < last)[:, None] & inside[None, :]
    y = tl.load(y_at, mask=mask, other=0.0).to(tl.float32) + tl.dot(low, b, input_precision="ieee")
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=mask)


class _RankedMatrices(SlotMatrices):
    """`SlotMatrices` with the ranks also on the device; R is a power of 2."""

    def __init__(self, shape: DeltaShape) -> None:
        super().__init__(shape._replace(max_rank=max(_LEAST, int(triton.next_power_of_2(shape.max_rank)))))
        self.device_ranks = torch.zeros(shape.num_slots, dtype=torch.int32, device=shape.device)

    def put(self, slot: int, packed: PackedDelta | None) -> None:
        super().put(slot, packed)
        self.device_ranks[slot].fill_(self.ranks[slot])


class TritonDelta(_RankedMatrices):
    """A linear layer."""

    def __init__(self, shape: DeltaShape) -> None:
        super().__init__(shape)
        self._splits = max(1, min(shape.inputs // _SPLIT_INPUTS, _MAX_SPLITS))
        blocks = triton.cdiv(triton.cdiv(shape.inputs, _TILE_INPUTS), self._splits)
        self._inputs_per_split = blocks * _TILE_INPUTS
        tiles, start = [], 0
        for module, size in enumerate(shape.outputs):
            stop = start + size
            tiles += [(module, first, stop) for first in range(start, stop, _TILE_OUTPUTS)]
            start = stop
        self._tiles = torch.tensor(tiles, dtype=torch.int32, device=shape.device)

    def add(self, x: Tensor, y: Tensor, runs: AdapterRuns) -> Tensor:
        inputs, rank = self.shape.inputs, self.shape.max_rank
        num_tokens, num_modules = len(x), len(self.shape.outputs)
        num_runs = (len(runs.plan) - 1) // 3
        assert x.dtype == self.a.dtype and x.shape[1] == inputs, (x.dtype, x.shape)
        assert y.is_contiguous() and y.shape == (num_tokens, self.b.shape[1]), y.shape
        if x.stride(1) != 1:
            x = x.contiguous()
        low = torch.empty(
            (self._splits, num_tokens, num_modules * rank), dtype=torch.float32, device=x.device
        )
        tile_tokens = _tile_tokens(num_tokens)
        _shrink_kernel[(num_runs, num_modules, self._splits)](
            x,
            self.a,
            low,
            runs.plan,
            self.device_ranks,
            x.stride(0),
            inputs,
            self._inputs_per_split,
            num_tokens,
            NUM_MODULES=num_modules,
            RANK=rank,
            TILE_TOKENS=tile_tokens,
            TILE_INPUTS=_tile_inputs(rank),
        )
        _expand_kernel[(num_runs, len(self._tiles))](
            low,
            self.b,
            y,
            runs.plan,
            self.device_ranks,
            self._tiles,
            y.shape[1],
            num_tokens,
            NUM_MODULES=num_modules,
            RANK=rank,
            SPLITS=self._splits,
            TILE_TOKENS=tile_tokens,
            TILE_RANK=min(rank, _TILE_RANK),
            TILE_OUTPUTS=_TILE_OUTPUTS,
            num_stages=_EXPAND_STAGES,
        )
        return y


class TritonEmbeddingDelta(_RankedMatrices):
    """The embedding."""

    is_table = True

    def add(self, x: Tensor, y: Tensor, runs: AdapterRuns) -> Tensor:
        num_tokens, size = y.shape
        assert y.is_contiguous() and len(x) == num_tokens, y.shape
        _embed_kernel[((len(runs.plan) - 1) // 3, triton.cdiv(size, _TILE_OUTPUTS))](
            self.a,
            x,
            self.b,
            y,
            runs.plan,
            self.device_ranks,
            size,
            self.a.shape[1],
            RANK=self.shape.max_rank,
            TILE_TOKENS=_tile_tokens(num_tokens),
            TILE_OUTPUTS=_TILE_OUTPUTS,
        )
        return y


deltas: Final = MakeDeltas(TritonDelta, TritonEmbeddingDelta)


def _tile_tokens(num_tokens: int) -> int:
    """Tokens of a program: of the longest run that is possible."""
    return _LEAST if num_tokens <= _LEAST else MAX_RUN_TOKENS


def _tile_inputs(rank: int) -> int:
    return max(_LEAST, min(_TILE_INPUTS, _TILE_NUMBERS // rank))


def variants() -> list[KernelVariant]:
    found = []
    for rank, num_modules, splits, tokens in (
        (16, 3, 4, 16),
        (16, 2, 1, 32),
        (64, 1, 8, 32),
        (512, 1, 4, 32),
    ):
        name = f"rank {rank}, {num_modules} modules, {tokens} tokens"
        plan = {"plan_ptr": "*i64", "ranks_ptr": "*i32"}
        constants: dict[str, Any] = {"NUM_MODULES": num_modules, "RANK": rank, "TILE_TOKENS": tokens}
        shrink = {"x_ptr": "*bf16", "a_ptr": "*bf16", "low_ptr": "*fp32", "x_stride": "i32:16"}
        numbers = {"num_inputs": "i32:16", "inputs_per_split": "i32:16", "num_tokens": "i32"}
        found.append(
            KernelVariant(
                f"lora_shrink bf16, {name}",
                _shrink_kernel,
                {**shrink, **numbers, **plan},
                {**constants, "TILE_INPUTS": _tile_inputs(rank)},
            )
        )
        expand = {"low_ptr": "*fp32", "b_ptr": "*bf16", "y_ptr": "*bf16", "tiles_ptr": "*i32"}
        found.append(
            KernelVariant(
                f"lora_expand bf16, {name}",
                _expand_kernel,
                {**expand, **plan, "width": "i32:16", "num_tokens": "i32"},
                {
                    **constants,
                    "SPLITS": splits,
                    "TILE_RANK": min(rank, _TILE_RANK),
                    "TILE_OUTPUTS": _TILE_OUTPUTS,
                },
                num_stages=_EXPAND_STAGES,
            )
        )
    found.append(
        KernelVariant(
            "lora_embed bf16, rank 16",
            _embed_kernel,
            {
                "table_ptr": "*bf16",
                "ids_ptr": "*i64",
                "b_ptr": "*bf16",
                "y_ptr": "*bf16",
                "plan_ptr": "*i64",
                "ranks_ptr": "*i32",
                "width": "i32:16",
                "vocab_size": "i32:16",
            },
            {"RANK": 16, "TILE_TOKENS": 16, "TILE_OUTPUTS": _TILE_OUTPUTS},
        )
    )
    return found
