"""Root-mean-square normalisation, alone and together with the residual addition before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .. import ops

if TYPE_CHECKING:
    from ..weights.reader import WeightReader


class RMSNorm:
    """x / rms(x) * weight."""

    def __init__(self, weights: WeightReader, name: str, size: int, eps: float) -> None:
        self.weight = weights.tensor(f"{name}.weight", (size,))
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[T, size] -> [T, size]."""
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); `residual` may be overwritten."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)
