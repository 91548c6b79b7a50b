"""Operations by sgl_kernel's CUDA kernels, and the cases that they do not support.

The operators are called by their names in torch, not through sgl_kernel's Python functions: those delegate to
flashinfer if it is installed, and flashinfer compiles on first use. Signatures are in
`tests/model_runner/kernels/sgl_signatures`. Only `operators` imports sgl_kernel; call it only where `probe` has found
that the import works.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

_VECTOR_BYTES: Final = 16
"""Bytes that the gated activations read at once: each half of a row must be a multiple of this."""


def reasons_against_dtype(dtype: torch.dtype) -> list[str]:
    """Reason why the norms and gated activations cannot compute in this dtype."""
    if dtype not in (torch.bfloat16, torch.float16):
        return [f"computes in bfloat16 and float16, not in {str(dtype).removeprefix('torch.')}"]
    return []


def reasons_against_wide_weights(float32_norms: bool) -> list[str]:
    """Reason why the norms cannot take these weights: they read weights in the dtype of the activations."""
    return (
        ["needs norm weights in the activations' dtype; this model keeps them in float32"]
        if float32_norms
        else []
    )


def reasons_against_width(width: int, dtype: torch.dtype) -> list[str]:
    """Reason why the gated activations cannot take this width."""
    vector = _VECTOR_BYTES // dtype.itemsize
    if width % vector:
        return [f"needs a width that is a multiple of {vector}, not {width}"]
    return []


def operators() -> Any:
    """torch.ops.sgl_kernel, with its library loaded."""
    import sgl_kernel  # noqa: F401  (registers the operators)

    return torch.ops.sgl_kernel


def supports_pdl(capability: tuple[int, int]) -> bool:
    """Whether a kernel may launch while the previous one still runs (programmatic dependent launch): from Hopper on."""
    return capability >= (9, 0)


class Norms:
    """`RMSNormOp` and `AddRMSNormOp`."""

    def __init__(self, operators: Any, *, pdl: bool) -> None:
        """`pdl`: see `supports_pdl`."""
        self._norm = operators.rmsnorm.default
        self._add_norm = operators.fused_add_rmsnorm.default
        self._pdl = pdl

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if out.numel():  # a launch with an empty grid is an error
            size = x.shape[-1]
            rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, size).contiguous()
            self._norm(out.view(-1, size), rows, weight, eps, self._pdl)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Overwrites both."""
        x, residual = x.contiguous(), residual.contiguous()
        if x.numel():
            self._add_norm(x, residual, weight, eps, self._pdl)
        return x, residual


class SglGatedActivation:
    """`GatedActivation`."""

    def __init__(self, operator: Any) -> None:
        """`operator`: called with (out [T, N], in [T, 2N])."""
        self._operator = operator

    def __call__(self, gate_up: Tensor) -> Tensor:
        out = torch.empty(
            (gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype, device=gate_up.device
        )
        if out.numel():
            self._operator(out, gate_up.contiguous())
        return out
