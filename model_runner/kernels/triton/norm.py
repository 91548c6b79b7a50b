"""RMS norms in Triton: of rows, and of a residual stream fused with the preceding addition.

One program per row, the whole row in registers: each row is read once and written once.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, possibly-undefined"
# Triton kernels: arguments have no type annotations, and branches on `tl.constexpr` values are taken at compile time.

# Shapes: T rows, K values per row.

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernel_variant import KernelVariant

_NUMBERS_PER_THREAD: Final = 16
_MAX_WARPS: Final = 32


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, x_stride, out_stride, size, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    tl.store(
        out_ptr + row * out_stride + column, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside
    )


@triton.jit
def _add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    residual_stride,
    out_stride,
    size,
    eps,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    residual_at = residual_ptr + row * residual_stride + column
    residual = tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
    # Normalize the residual as it is stored, after rounding, as the unfused operations do.
    residual = (residual + x).to(residual_ptr.dtype.element_ty)
    tl.store(residual_at, residual, mask=inside)
    residual = residual.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(residual * residual, axis=0) / size + eps)
    tl.store(
        out_ptr + row * out_stride + column,
        (residual * scale * weight).to(out_ptr.dtype.element_ty),
        mask=inside,
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rows may have any stride; leading axes that cannot be merged into one are copied."""
    size = x.shape[-1]
    rows = _rows(x.reshape(-1, size))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        block, num_warps = _launch(size)
        _rms_norm_kernel[(rows.shape[0],)](
            rows, weight, out, rows.stride(0), size, size, eps, BLOCK=block, num_warps=num_warps
        )
    return out


def norm_rows_in_place(rows: Tensor, weight: Tensor, eps: float) -> None:
    """The same in place; rows [T, K] of contiguous values, with any distance."""
    assert rows.stride(1) == 1, rows.stride()
    num_rows, size = rows.shape
    block, num_warps = _launch(size)
    stride = rows.stride(0)
    _rms_norm_kernel[(num_rows,)](
        rows, weight, rows, stride, stride, size, eps, BLOCK=block, num_warps=num_warps
    )


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream is overwritten, x is not."""
    num_rows, size = x.shape
    x, residual = _rows(x), _rows(residual)
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if num_rows:
        block, num_warps = _launch(size)
        _add_rms_norm_kernel[(num_rows,)](
            x,
            residual,
            weight,
            out,
            x.stride(0),
            residual.stride(0),
            size,
            size,
            eps,
            BLOCK=block,
            num_warps=num_warps,
        )
    return out, residual


def _rows(x: Tensor) -> Tensor:
    """View x as rows of contiguous values; copies if necessary."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _launch(size: int) -> tuple[int, int]:
    """Row size rounded up to a power of two, and the number of warps per row."""
    block: int = triton.next_power_of_2(size)
    return block, min(max(block // (32 * _NUMBERS_PER_THREAD), 1), _MAX_WARPS)


def variants() -> list[KernelVariant]:
    found = []
    for size, dtype, weight in (
        (128, "bf16", "fp32"),
        (576, "bf16", "bf16"),
        (4096, "bf16", "bf16"),
        (16384, "fp32", "fp32"),
    ):
        block, num_warps = _launch(size)
        strides = {"x_stride": "i32:16", "out_stride": "i32:16", "size": "i32:16", "eps": "fp32"}
        pointers = {"x_ptr": f"*{dtype}", "weight_ptr": f"*{weight}", "out_ptr": f"*{dtype}"}
        constants: dict[str, Any] = {"BLOCK": block}
        name = f"{dtype}, weight {weight}, size {size}"
        found.append(
            KernelVariant(f"rms_norm {name}", _rms_norm_kernel, pointers | strides, constants, num_warps)
        )
        more = {"residual_ptr": f"*{dtype}", "residual_stride": "i32:16"}
        found.append(
            KernelVariant(
                f"add_rms_norm {name}", _add_rms_norm_kernel, pointers | strides | more, constants, num_warps
            )
        )
    return found
