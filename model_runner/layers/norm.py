"""Norms of layers: root mean square and layer norm, alone and fused with the residual addition before them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..model_context import ModelContext


class Norm(Protocol):
    """A norm over the last axis."""

    def __call__(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        ...

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); both arguments may be overwritten."""
        ...


class RMSNorm:
    """x / rms(x) * weight over the last axis."""

    def __init__(self, context: ModelContext, name: str, size: int, eps: float) -> None:
        self.weight = context.weights.tensor(f"{name}.weight", (size,))
        self.eps = eps
        self._ops = context.ops

    def __call__(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return self._ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); both arguments may be overwritten."""
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps)


class UnitOffsetRMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight), as in Gemma.

    1 + weight is stored in float32 for every serving dtype: in a 16-bit dtype the sum loses most digits of a small
    weight.
    """

    def __init__(self, context: ModelContext, name: str, size: int, eps: float) -> None:
        self.weight = context.weights.tensor(f"{name}.weight", (size,), dtype=torch.float32) + 1.0
        self.eps = eps
        self._ops = context.ops


class LayerNorm:
    """(x - mean(x)) / std(x) * weight (+ bias) over the last axis."""

    def __init__(self, context: ModelContext, name: str, size: int, eps: float, *, bias: bool) -> None:
        """Take the weights from a checkpoint."""
        self.weight = context.weights.tensor(f"{name}.weight", (size,))
        self.bias = context.weights.tensor(f"{name}.bias", (size,)) if bias else None
        self.eps = eps
        self._ops = context.ops

    def __call__(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return self._ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); both arguments may be overwritten."""
        return self._ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps)
