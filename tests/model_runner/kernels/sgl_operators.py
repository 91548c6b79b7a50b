"""sgl_kernel's operators on the CPU, from the schemas in its wheels; they insist on what the CUDA kernels insist on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from .sgl_signatures import operator_schemas


def _norm(output, x, weight, eps, enable_pdl):
    assert x.dim() == output.dim() == 2 and x.stride(1) == 1 and output.is_contiguous()
    assert x.shape[0] > 0 and weight.dtype == x.dtype
    output.copy_(F.rms_norm(x, x.shape[1:], weight, eps))


def _add_norm(x, residual, weight, eps, enable_pdl):
    assert x.dim() == 2 and x.is_contiguous() and residual.is_contiguous()
    assert x.shape[0] > 0 and weight.dtype == x.dtype
    residual.add_(x)
    x.copy_(F.rms_norm(residual, residual.shape[1:], weight, eps))


def _silu(out, x):
    assert x.is_contiguous() and out.is_contiguous() and out.shape[0] > 0
    out.copy_(F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1])


def _gelu(out, x):
    assert x.is_contiguous() and out.is_contiguous() and out.shape[0] > 0
    out.copy_(F.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1])


def _scaled_mm(a, b, scales_a, scales_b, dtype, bias):
    assert a.dtype == b.dtype == torch.float8_e4m3fn and a.stride(1) == 1 and b.stride(0) == 1
    assert scales_a.numel() == a.shape[0] and scales_b.numel() == b.shape[1]
    assert scales_a.dtype == scales_b.dtype == torch.float32
    assert scales_a.is_contiguous() and scales_b.is_contiguous()
    assert a.shape[1] % 16 == 0 and b.shape[1] % 8 == 0 and dtype in (torch.bfloat16, torch.float16)
    assert bias is None or (bias.numel() == b.shape[1] and bias.is_contiguous() and bias.dtype == dtype)
    out = (a.float() * scales_a.view(-1, 1)) @ (b.float() * scales_b.view(1, -1))
    return (out if bias is None else out + bias.float()).to(dtype)


def _scaled_mm_form(a, b, scales_a, scales_b, dtype, bias) -> Tensor:
    return torch.empty(a.shape[0], b.shape[1], dtype=dtype, device=a.device)


_BODIES: Final[dict[str, Callable[..., Any]]] = {
    "rmsnorm": _norm,
    "fused_add_rmsnorm": _add_norm,
    "silu_and_mul": _silu,
    "gelu_tanh_and_mul": _gelu,
    "fp8_scaled_mm": _scaled_mm,
}


def define_operators(space: str, version: str) -> torch.library.Library:
    """Register the operators of a wheel's version as torch.ops.SPACE; they exist as long as the library does."""
    library = torch.library.Library(space, "DEF")
    for name, body in _BODIES.items():
        library.define(operator_schemas(version)[name])
        library.impl(name, body, "CPU")
    library.impl("fp8_scaled_mm", _scaled_mm_form, "Meta")
    return library
