"""Layer normalization, alone and fused with the residual addition before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from ..model_context import ModelContext


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
