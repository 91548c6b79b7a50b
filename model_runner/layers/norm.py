"""Root-mean-square normalisation, alone and together with the residual addition before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..model_context import ModelContext


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
    """x / rms(x) * (1 + weight), as Gemma has it.

    Kept as 1 + weight in float32, whatever the serving dtype: the sum would lose most of a small weight's digits.
    """

    def __init__(self, context: ModelContext, name: str, size: int, eps: float, scale: float = 1.0) -> None:
        """`scale`: a factor of the result."""
        self.weight = (context.weights.tensor(f"{name}.weight", (size,), dtype=torch.float32) + 1.0) * scale
        self.eps = eps
        self._ops = context.ops
