"""GEMMs with 4-bit weights: a tile of packed integers is dequantized in registers and multiplied directly.

All checkpoint formats are repacked into one layout. Inputs are taken in blocks of 128. A 32-bit word holds the integers
of eight inputs that are 16 apart, so one shift and one mask of a tile of words give 16 neighboring inputs: the K
extent of one matrix instruction, without shuffles and without reading a word twice.

    word [16 * b + r, n]: bits 4j..4j+3 are the integer of input 128 * b + 16 * j + r, output n  0 <= j < 8, 0 <= r < 16

Groups of inputs that share a scale are multiples of 16, so a tile has one row of scales and one of zero points.
"""

# Shapes: M rows, K inputs, N outputs, G groups, S splits.

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernel_variant import KernelVariant
from .split_k import TILE_OUTPUTS, SplitProduct, gemm_variant, store_tile, tile_of

BLOCK_K: Final = 128
_NIBBLES: Final = 8
_ROWS: Final = BLOCK_K // _NIBBLES


def pack_int4(numbers: Tensor) -> Tensor:
    """[K, N] uint8 of 0..15 to [ceil(K / 128) * 16, N] int32; inputs that complete the last block are 0."""
    num_inputs, width = numbers.shape
    num_blocks = -(-num_inputs // BLOCK_K)
    padded = numbers.new_zeros((num_blocks * BLOCK_K, width))
    padded[:num_inputs] = numbers
    by_nibble = padded.view(num_blocks, _NIBBLES, _ROWS, width)
    words = torch.zeros((num_blocks, _ROWS, width), dtype=torch.int32, device=numbers.device)
    for nibble in range(_NIBBLES):
        words |= by_nibble[:, nibble].to(torch.int32) << (4 * nibble)
    return words.view(num_blocks * _ROWS, width)


@triton.jit
def _scale_and_zero(scales_ptr, zeros_ptr, at, there):
    scale = tl.load(scales_ptr + at, mask=there, other=0.0).to(tl.float32)
    return scale, tl.load(zeros_ptr + at, mask=there, other=0).to(tl.float32)


@triton.jit
def _unpacked(
    words,
    nibble: tl.constexpr,
    block,
    scale,
    zero,
    scales_ptr,
    zeros_ptr,
    n,
    inside,
    num_inputs,
    width,
    GROUP: tl.constexpr,
):
    """16 inputs of a block: [16, N] float32, with their scale and zero; `scale`, `zero`: those of the inputs before."""
    k = block * 128 + nibble * 16
    # Load the scale once per group, or once per block if a group spans at least a block.
    if GROUP > 0 and (nibble == 0 or (nibble * 16) % GROUP == 0):
        there = inside & (k < num_inputs)
        scale, zero = _scale_and_zero(scales_ptr, zeros_ptr, (k // GROUP) * width + n, there)
    number = ((words >> (4 * nibble)) & 15).to(tl.float32)
    return (number - zero[None, :]) * scale[None, :], scale, zero


@triton.jit(do_not_specialize=["num_rows", "blocks_per_split"])  # one compilation for any number of rows
def _int4_gemm_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_inputs,
    width,
    x_stride,
    blocks_per_split,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """GROUP: inputs of a group, 0 for one group of all. With several splits `out` is [S, M, N] float32."""
    n, m, first, last = tile_of(num_inputs, blocks_per_split, BLOCK_M, BLOCK_N, 128)
    r = tl.arange(0, 16)
    x_rows = x_ptr + m.to(tl.int64)[:, None] * x_stride
    has_row = m[:, None] < num_rows
    inside = n < width
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    scale, zero = _scale_and_zero(scales_ptr, zeros_ptr, n, inside)
    for block in range(first, last):
        at = words_ptr + (block * 16 + r)[:, None].to(tl.int64) * width + n[None, :]
        words = tl.load(at, mask=inside[None, :], other=0)
        for nibble in tl.static_range(8):
            weight, scale, zero = _unpacked(
                words, nibble, block, scale, zero, scales_ptr, zeros_ptr, n, inside, num_inputs, width, GROUP
            )
            k = block * 128 + nibble * 16 + r[None, :]
            x = tl.load(x_rows + k, mask=has_row & (k < num_inputs), other=0.0)
            acc = tl.dot(x, weight.to(x_ptr.dtype.element_ty), acc, input_precision="ieee")
    store_tile(acc, bias_ptr, out_ptr, m, n, num_rows, width, HAS_BIAS)


@triton.jit
def _dequantize_kernel(
    words_ptr, scales_ptr, zeros_ptr, out_ptr, num_inputs, width, GROUP: tl.constexpr, BLOCK_N: tl.constexpr
):
    block = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, 16)
    inside = n < width
    words = tl.load(
        words_ptr + (block * 16 + r)[:, None].to(tl.int64) * width + n[None, :], mask=inside[None, :], other=0
    )
    scale, zero = _scale_and_zero(scales_ptr, zeros_ptr, n, inside)
    for nibble in tl.static_range(8):
        weight, scale, zero = _unpacked(
            words, nibble, block, scale, zero, scales_ptr, zeros_ptr, n, inside, num_inputs, width, GROUP
        )
        k = block * 128 + nibble * 16 + r[:, None]
        out_at = out_ptr + k.to(tl.int64) * width + n[None, :]
        tl.store(out_at, weight.to(out_ptr.dtype.element_ty), mask=(k < num_inputs) & inside[None, :])


def int4_gemm(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bias: Tensor | None,
    *,
    group_size: int,
    num_sms: int,
) -> Tensor:
    """x @ weight (+ bias): [M, K] -> [M, N] in x's dtype. For many rows prefer `dequantize_int4`: each row tile unpacks
    the weight again.

    Args:
        x: rows of any stride.
        words: packed by `pack_int4`.
        scales, zeros: [G, N], any floating-point dtype and uint8.
        group_size: 0 for one group, else a multiple of 16 that divides 128, or a multiple of 128.
    """
    num_rows, num_inputs = x.shape
    width = words.shape[1]
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    cut = SplitProduct(out, bias, num_inputs, BLOCK_K, num_sms)
    _int4_gemm_kernel[cut.grid](
        x,
        words,
        scales,
        zeros,
        cut.bias,
        cut.target,
        num_rows,
        num_inputs,
        width,
        x.stride(0),
        cut.blocks_per_split,
        GROUP=group_size,
        **cut.constants,
    )
    return cut.finish()


def dequantize_int4(
    words: Tensor, scales: Tensor, zeros: Tensor, *, num_inputs: int, group_size: int, dtype: torch.dtype
) -> Tensor:
    """The whole weight, dequantized: [K, N]. Arguments as in `int4_gemm`."""
    width = words.shape[1]
    out = torch.empty((num_inputs, width), dtype=dtype, device=words.device)
    grid = (triton.cdiv(num_inputs, BLOCK_K), triton.cdiv(width, 2 * TILE_OUTPUTS))
    _dequantize_kernel[grid](
        words, scales, zeros, out, num_inputs, width, GROUP=group_size, BLOCK_N=2 * TILE_OUTPUTS, num_warps=4
    )
    return out


def variants() -> list[KernelVariant]:
    packed = {"words_ptr": "*i32", "scales_ptr": "*fp16", "zeros_ptr": "*u8"}
    signature = packed | {"x_ptr": "*bf16", "x_stride": "i32:16"}
    found = [
        gemm_variant(
            f"int4_gemm {rows} rows, group {group}",
            _int4_gemm_kernel,
            signature,
            {"GROUP": group},
            rows,
            splits,
        )
        for rows, group, splits in ((16, 128, 4), (16, 32, 1), (32, 0, 1), (64, 64, 1), (64, 128, 4))
    ]
    signature = packed | {"num_inputs": "i32:16", "width": "i32:16", "out_ptr": "*bf16"}
    constants = {"GROUP": 128, "BLOCK_N": 2 * TILE_OUTPUTS}
    found.append(KernelVariant("dequantize_int4 group 128", _dequantize_kernel, signature, constants))
    return found
