"""Gated feed-forward block, SiLU(gate) * up, with gate and up in one matrix product."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .. import ops
from .linear import Linear

if TYPE_CHECKING:
    from ..weights.reader import WeightReader


class GatedMLP:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, weights: WeightReader, name: str, size: int, inner: int, *, bias: bool) -> None:
        self.gate_up = Linear(
            weights, [f"{name}.gate_proj", f"{name}.up_proj"], size, [inner, inner], bias=bias
        )
        self.down = Linear(weights, [f"{name}.down_proj"], inner, [size], bias=bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, size] -> [T, size]."""
        return self.down(ops.silu_and_mul(self.gate_up(x)))
