"""Split-K GEMMs for few rows: the inputs are split among programs, and a second kernel adds up the partial results.

A decode step has so few output tiles that most of a GPU would idle. Partial results are stored in float32 and added in
a fixed order: atomic additions would save a launch, but the last bits would differ from run to run.
"""

# Shapes: M rows, N outputs, S splits.

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernel_variant import KernelVariant

TILE_OUTPUTS: Final = 64
MAX_TILE_ROWS: Final = 64
MAX_SPLITS: Final = 16
STAGES: Final = 4
_MIN_BLOCKS_PER_SPLIT: Final = 4
_PROGRAMS_PER_SM: Final = ((32, 4), (64, 2))
"""(tile rows up to, programs per SM to aim at): small tiles wait for memory; large tiles fill the SM. Not measured."""
_BLOCK: Final = 1024


@triton.jit
def _add_splits_kernel(
    partial_ptr,
    bias_ptr,
    out_ptr,
    num_numbers,
    width,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_numbers
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial_ptr + split * num_numbers + at, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + at % width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def tile_of(
    num_inputs, blocks_per_split, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """A program's outputs n and rows m, and its blocks of inputs: the first, and the one after the last."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(2) * blocks_per_split
    return n, m, first, tl.minimum(first + blocks_per_split, tl.cdiv(num_inputs, BLOCK_K))


@triton.jit
def store_tile(acc, bias_ptr, out_ptr, m, n, num_rows, width, HAS_BIAS: tl.constexpr):
    """Store a program's sums [m, n], with the bias: `out` is [M, N], or with several splits [S, M, N] float32."""
    has_row, inside = m < num_rows, n < width
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    out_at = out_ptr + (tl.program_id(2).to(tl.int64) * num_rows + m[:, None]) * width + n[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=has_row[:, None] & inside[None, :])


def num_splits(num_tiles: int, num_blocks: int, tile_rows: int, num_sms: int) -> int:
    """Number of parts into which to split `num_blocks` blocks of inputs for `num_tiles` output tiles."""
    wanted = num_sms * next(programs for rows, programs in _PROGRAMS_PER_SM if tile_rows <= rows)
    splits = 1
    while (
        splits < MAX_SPLITS
        and num_tiles * splits < wanted
        and num_blocks >= 2 * splits * _MIN_BLOCKS_PER_SPLIT
    ):
        splits *= 2
    return splits


class SplitProduct:
    """The launch of one GEMM [M, K] -> [M, N]: cut into tiles of the output, and the inputs of each tile into parts.

    Attributes:
        grid: (tiles of outputs, tiles of rows, S).
        tile_rows: rows of M per tile, a power of 2.
        blocks_per_split: blocks of `tile_inputs` inputs per split.
        target: where programs store: [M, N] of the result, or with several splits [S, M, N] float32.
        bias: added by the programs; None if `finish` adds it.
    """

    def __init__(
        self, out: Tensor, bias: Tensor | None, num_inputs: int, tile_inputs: int, num_sms: int
    ) -> None:
        """`out`: [M, N], M > 0; holds the result after `finish`."""
        num_rows, width = out.shape
        self.tile_rows = min(max(16, triton.next_power_of_2(num_rows)), MAX_TILE_ROWS)
        tiles = (triton.cdiv(width, TILE_OUTPUTS), triton.cdiv(num_rows, self.tile_rows))
        num_blocks = triton.cdiv(num_inputs, tile_inputs)
        splits = num_splits(tiles[0] * tiles[1], num_blocks, self.tile_rows, num_sms)
        self.grid = (*tiles, splits)
        self.blocks_per_split: int = triton.cdiv(num_blocks, splits)
        self._out, self._bias = out, bias
        self.target, self.bias = out, bias
        if splits > 1:
            self.target = torch.empty((splits, num_rows, width), dtype=torch.float32, device=out.device)
            self.bias = None

    @property
    def constants(self) -> dict[str, Any]:
        """Constants of the launch that all GEMMs have."""
        return {
            "HAS_BIAS": self.bias is not None,
            "BLOCK_M": self.tile_rows,
            "BLOCK_N": TILE_OUTPUTS,
            "num_warps": 4,
            "num_stages": STAGES,
        }

    def finish(self) -> Tensor:
        """Return the result. Call it after the kernel is launched."""
        if self.target is not self._out:
            _add_splits(self.target, self._bias, self._out)
        return self._out


def _add_splits(partial: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Add up [S, M, N] float32 and `bias` [N] into `out` [M, N]."""
    splits, num_rows, width = partial.shape
    grid = (triton.cdiv(num_rows * width, _BLOCK),)
    _add_splits_kernel[grid](
        partial, bias, out, num_rows * width, width, SPLITS=splits, HAS_BIAS=bias is not None, BLOCK=_BLOCK
    )


def gemm_variant(
    name: str,
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    rows: int,
    splits: int,
    **options: int,
) -> KernelVariant:
    """A GEMM as `SplitProduct` launches it, with tiles of so many rows; the bias is added by the last kernel."""
    is_whole = splits == 1
    types = {"num_rows": "i32", "num_inputs": "i32:16", "width": "i32:16", "blocks_per_split": "i32"}
    types |= {"out_ptr": "*bf16" if is_whole else "*fp32"} | ({"bias_ptr": "*bf16"} if is_whole else {})
    bias = {"HAS_BIAS": is_whole} | ({} if is_whole else {"bias_ptr": None})
    tile = {"BLOCK_M": rows, "BLOCK_N": TILE_OUTPUTS}
    return KernelVariant(
        f"{name}, {'whole' if is_whole else 'split'}",
        kernel,
        signature | types,
        constants | bias | tile,
        num_stages=STAGES,
        **options,
    )


def num_sms_of(device: torch.device) -> int:
    """Multiprocessors of a GPU; on other devices, where kernels are interpreted, those of an H100."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def variants() -> list[KernelVariant]:
    signature = {"partial_ptr": "*fp32", "out_ptr": "*bf16", "num_numbers": "i32", "width": "i32"}
    found = []
    for splits, has_bias in ((2, True), (MAX_SPLITS, False)):
        constants: dict[str, Any] = {"SPLITS": splits, "HAS_BIAS": has_bias, "BLOCK": _BLOCK}
        types = signature | {"bias_ptr": "*bf16"} if has_bias else signature
        if not has_bias:
            constants["bias_ptr"] = None
        found.append(KernelVariant(f"add_splits {splits}", _add_splits_kernel, types, constants))
    return found
