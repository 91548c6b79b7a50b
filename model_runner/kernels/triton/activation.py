"""The gated activations of MLPs in Triton: act(gate) * up in one pass, computed in float32 and rounded once."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, possibly-undefined"
# Triton kernels: arguments have no type annotations, and branches on `tl.constexpr` values are taken at compile time.

# Shapes: T tokens, N outputs; a row has 2N values, those of gate first, then those of up.

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

# Few rows are cut into small blocks, so that every multiprocessor gets one; many rows take fewer, larger blocks.
_SMALL_BLOCK: Final = 256
_LARGE_BLOCK: Final = 1024
_ENOUGH_PROGRAMS: Final = 512  # about four per multiprocessor of a large GPU


@triton.jit
def _gate_and_mul_kernel(x_ptr, out_ptr, x_stride, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    inner = gate
    if GELU:  # (1 + tanh(u)) / 2 is sigmoid(2u); u = sqrt(2 / pi) (x + 0.044715 x^3)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    out = gate / (1.0 + tl.exp(-inner)) * up
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=inside)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    return _gate_and_mul(gate_up, gelu=False)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Gelu by the tanh approximation."""
    return _gate_and_mul(gate_up, gelu=True)


def _gate_and_mul(gate_up: Tensor, *, gelu: bool) -> Tensor:
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        x = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
        large = num_tokens * triton.cdiv(width, _LARGE_BLOCK) >= _ENOUGH_PROGRAMS
        block = _LARGE_BLOCK if large else _SMALL_BLOCK
        _gate_and_mul_kernel[(num_tokens, triton.cdiv(width, block))](
            x, out, x.stride(0), width, GELU=gelu, BLOCK=block, num_warps=4 if large else 1
        )
    return out
