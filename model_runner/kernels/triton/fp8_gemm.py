"""FP8: activations are quantized per token; GEMMs with weights that have a scale per output or block.

`quantize_rows` precedes every FP8 GEMM, also those of other libraries. `fp8_gemm` covers what these do not support:
numbers of outputs that are not multiples of 16, and scales per group of 128 inputs, for which partial accumulators are
scaled before they are added up. Both need compute capability 8.9. `fp8_weight_gemm` does not: it converts weights to
the activations' dtype in registers, so older GPUs still read half the bytes.

FP8 rows that are not aligned to 16 bytes are read byte by byte: for `fp8_gemm` that takes more registers than there
are, so it is not chosen for such a number of inputs.
"""

# Shapes: M rows, K inputs, N outputs, G groups of inputs, S splits.

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantized_weights import FP8, FP8_MAX, SMALLEST_AMAX
from .kernel_variant import KernelVariant
from .split_k import SplitProduct, gemm_variant, store_tile, tile_of

GROUP: Final = 128
"""Inputs per group, where there are several groups: one K step of the GEMM."""

_MAX_FP8 = tl.constexpr(FP8_MAX)
_SMALLEST = tl.constexpr(SMALLEST_AMAX)
_MIN_ARCH: Final = 89
_WEIGHT_ONLY_BLOCK_K: Final = 64
_NUMBERS_AT_A_TIME: Final = 4096


@triton.jit
def _quantize_kernel(
    x_ptr, numbers_ptr, scales_ptr, x_stride, num_inputs, num_groups, group_size, bound, BLOCK: tl.constexpr
):
    """A program quantizes one group of one row. NaN stays NaN."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    start = group * group_size
    end = tl.minimum(start + group_size, num_inputs)
    lane = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    for offset in range(start, end, BLOCK):
        at = offset + lane
        x = tl.load(x_ptr + row * x_stride + at, mask=at < end, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    amax = tl.minimum(tl.maximum(tl.max(largest, axis=0), _SMALLEST), bound)
    scale = tl.div_rn(amax, _MAX_FP8)
    tl.store(scales_ptr + row * num_groups + group, scale)
    for offset in range(start, end, BLOCK):
        at = offset + lane
        x = tl.load(x_ptr + row * x_stride + at, mask=at < end, other=0.0).to(tl.float32)
        scaled = tl.div_rn(x, scale)
        scaled = tl.maximum(scaled, -_MAX_FP8, propagate_nan=tl.PropagateNan.ALL)
        scaled = tl.minimum(scaled, _MAX_FP8, propagate_nan=tl.PropagateNan.ALL)
        tl.store(numbers_ptr + row * num_inputs + at, scaled.to(tl.float8e4nv), mask=at < end)


@triton.jit(do_not_specialize=["num_rows", "blocks_per_split"])  # one compilation for any number of rows
def _fp8_gemm_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    weight_scales_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_inputs,
    width,
    num_groups,
    blocks_per_split,
    GROUPED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """GROUPED: a group is one block of inputs. With several splits `out` is [S, M, N] float32."""
    n, m, first, last = tile_of(num_inputs, blocks_per_split, BLOCK_M, BLOCK_N, BLOCK_K)
    lane = tl.arange(0, BLOCK_K)
    has_row = m < num_rows
    inside = n < width
    x_rows = x_ptr + m.to(tl.int64)[:, None] * num_inputs
    weight_columns = weight_ptr + n.to(tl.int64)[None, :] * num_inputs
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in range(first, last):
        k = block * BLOCK_K + lane
        there = k < num_inputs
        x = tl.load(x_rows + k[None, :], mask=has_row[:, None] & there[None, :], other=0.0)
        weight = tl.load(weight_columns + k[:, None], mask=inside[None, :] & there[:, None], other=0.0)
        if GROUPED:
            x_scale = tl.load(x_scales_ptr + m * num_groups + block, mask=has_row, other=0.0)
            weight_scale = tl.load(weight_scales_ptr + block * width + n, mask=inside, other=0.0)
            acc += tl.dot(x, weight) * (x_scale[:, None] * weight_scale[None, :])
        else:
            # Tensor cores accumulate FP8 products in fewer than 32 bits: every 128 inputs the result moves to float32.
            acc = tl.dot(x, weight, acc, max_num_imprecise_acc=128)
    if not GROUPED:
        x_scale = tl.load(x_scales_ptr + m, mask=has_row, other=0.0)
        weight_scale = tl.load(weight_scales_ptr + n, mask=inside, other=0.0)
        acc *= x_scale[:, None] * weight_scale[None, :]
    store_tile(acc, bias_ptr, out_ptr, m, n, num_rows, width, HAS_BIAS)


@triton.jit(do_not_specialize=["num_rows", "blocks_per_split"])
def _fp8_weight_gemm_kernel(
    x_ptr,
    weight_ptr,
    weight_scales_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_inputs,
    width,
    x_stride,
    blocks_per_split,
    GROUPED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr,
):
    """As `_fp8_gemm_kernel`, but weights are bytes, and a group has GROUP_BLOCKS blocks of inputs."""
    n, m, first, last = tile_of(num_inputs, blocks_per_split, BLOCK_M, BLOCK_N, BLOCK_K)
    lane = tl.arange(0, BLOCK_K)
    has_row = m < num_rows
    inside = n < width
    x_rows = x_ptr + m.to(tl.int64)[:, None] * x_stride
    weight_columns = weight_ptr + n.to(tl.int64)[None, :] * num_inputs
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in range(first, last):
        k = block * BLOCK_K + lane
        there = k < num_inputs
        x = tl.load(x_rows + k[None, :], mask=has_row[:, None] & there[None, :], other=0.0)
        byte = tl.load(weight_columns + k[:, None], mask=inside[None, :] & there[:, None], other=0).to(
            tl.int16
        )
        # Shift sign, exponent and mantissa into float16's positions; the bias differs by 8: exact, subnormals too.
        shifted = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)
        weight = (shifted.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(x_ptr.dtype.element_ty)
        if GROUPED:
            scale_at = weight_scales_ptr + (block // GROUP_BLOCKS) * width + n
            acc += (
                tl.dot(x, weight, input_precision="ieee") * tl.load(scale_at, mask=inside, other=0.0)[None, :]
            )
        else:
            acc = tl.dot(x, weight, acc, input_precision="ieee")
    if not GROUPED:
        acc *= tl.load(weight_scales_ptr + n, mask=inside, other=0.0)[None, :]
    store_tile(acc, bias_ptr, out_ptr, m, n, num_rows, width, HAS_BIAS)


def quantize_rows(x: Tensor, group_size: int, bound: float | None = None) -> tuple[Tensor, Tensor]:
    """Quantize each row of [M, K], or each group of its values, to 8 bits: ([M, K] e4m3, scales [M, G] float32).

    A scale is the largest absolute value / 448, or `bound` / 448 if that is less: larger values are clamped to it.
    """
    num_rows, num_inputs = x.shape
    num_groups = triton.cdiv(num_inputs, group_size)
    numbers = torch.empty((num_rows, num_inputs), dtype=FP8, device=x.device)
    scales = torch.empty((num_rows, num_groups), dtype=torch.float32, device=x.device)
    if num_rows:
        block = min(triton.next_power_of_2(min(group_size, num_inputs)), _NUMBERS_AT_A_TIME)
        _quantize_kernel[(num_rows, num_groups)](
            x,
            numbers,
            scales,
            x.stride(0),
            num_inputs,
            num_groups,
            group_size,
            float("inf") if bound is None else bound,
            BLOCK=block,
            num_warps=_quantize_warps(block),
        )
    return numbers, scales


def fp8_gemm(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    num_sms: int,
) -> Tensor:
    """x @ weight.T (+ bias), both quantized: [M, K] -> [M, N] of `dtype`.

    Args:
        x: [M, K], contiguous, and its scales [M, G], as `quantize_rows` returns them.
        weight: [N, K], contiguous; slow if K is not a multiple of 16.
        weight_scales: [G, N]; with several groups each has 128 inputs.
    """
    num_rows, num_inputs = x.shape
    width = weight.shape[0]
    num_groups = weight_scales.shape[0]
    out = torch.empty((num_rows, width), dtype=dtype, device=x.device)
    if num_rows == 0:
        return out
    cut = SplitProduct(out, bias, num_inputs, GROUP, num_sms)
    _fp8_gemm_kernel[cut.grid](
        x,
        x_scales,
        weight,
        weight_scales,
        cut.bias,
        cut.target,
        num_rows,
        num_inputs,
        width,
        num_groups,
        cut.blocks_per_split,
        GROUPED=num_groups > 1,
        BLOCK_K=GROUP,
        **cut.constants,
    )
    return cut.finish()


def fp8_weight_gemm(
    x: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, group_size: int, num_sms: int
) -> Tensor:
    """x @ weight.T (+ bias), only the weight quantized: [M, K] -> [M, N] in x's dtype.

    Args:
        x: rows of any stride.
        weight: [N, K], contiguous.
        weight_scales: [G, N].
        group_size: inputs per group, where there are several groups: a multiple of 64.
    """
    num_rows, num_inputs = x.shape
    width, num_groups = weight.shape[0], weight_scales.shape[0]
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    cut = SplitProduct(out, bias, num_inputs, _WEIGHT_ONLY_BLOCK_K, num_sms)
    _fp8_weight_gemm_kernel[cut.grid](
        x,
        weight.view(torch.uint8),
        weight_scales,
        cut.bias,
        cut.target,
        num_rows,
        num_inputs,
        width,
        x.stride(0),
        cut.blocks_per_split,
        GROUPED=num_groups > 1,
        BLOCK_K=_WEIGHT_ONLY_BLOCK_K,
        GROUP_BLOCKS=group_size // _WEIGHT_ONLY_BLOCK_K if num_groups > 1 else 1,
        **cut.constants,
    )
    return cut.finish()


def _quantize_warps(block: int) -> int:
    return min(max(block // 512, 1), 8)


def variants() -> list[KernelVariant]:
    found = []
    for block in (GROUP, _NUMBERS_AT_A_TIME):
        signature = {"x_ptr": "*bf16", "numbers_ptr": "*fp8e4nv", "scales_ptr": "*fp32", "x_stride": "i32:16"}
        signature |= {"num_inputs": "i32:16", "num_groups": "i32", "group_size": "i32:16", "bound": "fp32"}
        name = f"quantize_rows {block} at a time"
        found.append(
            KernelVariant(
                name,
                _quantize_kernel,
                signature,
                {"BLOCK": block},
                _quantize_warps(block),
                min_arch=_MIN_ARCH,
            )
        )
    for rows, grouped, splits in ((16, False, 4), (16, True, 4), (64, False, 1), (64, True, 1)):
        name = f"{rows} rows, {'groups' if grouped else 'rows'}"
        signature = {"x_ptr": "*fp8e4nv", "x_scales_ptr": "*fp32", "weight_ptr": "*fp8e4nv"}
        signature |= {"weight_scales_ptr": "*fp32", "num_groups": "i32"}
        constants: dict[str, Any] = {"GROUPED": grouped, "BLOCK_K": GROUP}
        found.append(
            gemm_variant(
                f"fp8_gemm {name}", _fp8_gemm_kernel, signature, constants, rows, splits, min_arch=_MIN_ARCH
            )
        )
        signature = {
            "x_ptr": "*bf16",
            "weight_ptr": "*u8",
            "weight_scales_ptr": "*fp32",
            "x_stride": "i32:16",
        }
        constants |= {"BLOCK_K": _WEIGHT_ONLY_BLOCK_K, "GROUP_BLOCKS": 2 if grouped else 1}
        found.append(
            gemm_variant(
                f"fp8_weight_gemm {name}", _fp8_weight_gemm_kernel, signature, constants, rows, splits
            )
        )
    return found
