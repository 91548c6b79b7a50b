"""Gated feed-forward block, act(gate) * up, with gate and up in one matrix product."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import ops
from .linear import Linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ..weights.reader import WeightReader


class GatedMLP:
    """down(act(gate(x)) * up(x))."""

    def __init__(
        self,
        weights: WeightReader,
        name: str,
        size: int,
        inner: int,
        *,
        bias: bool = False,
        fused: bool = False,
        activation: Callable[[Tensor], Tensor] = ops.silu_and_mul,
    ) -> None:
        """Take the weights from a checkpoint.

        Args:
            fused: the checkpoint holds gate and up as one `gate_up_proj`.
            activation: of `ops`, [T, 2 * inner] with the gate in the first half -> [T, inner].
        """
        names, sizes = [f"{name}.gate_proj", f"{name}.up_proj"], [inner, inner]
        if fused:
            names, sizes = [f"{name}.gate_up_proj"], [2 * inner]
        self.gate_up = Linear(weights, names, size, sizes, bias=bias)
        self.down = Linear(weights, [f"{name}.down_proj"], inner, [size], bias=bias)
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """[T, size] -> [T, size]."""
        return self.down(self.activation(self.gate_up(x)))
