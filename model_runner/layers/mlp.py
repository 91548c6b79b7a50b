"""Gated feed-forward block, act(gate) * up, with gate and up in one matrix product."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..ops import GateableWeight
from .linear import Linear, RowLinear
from .spans import equal_span

if TYPE_CHECKING:
    from torch import Tensor

    from ..model_context import ModelContext
    from ..ops import GatedActivation

logger = logging.getLogger(__name__)


class GatedMLP:
    """down(act(gate(x)) * up(x))."""

    def __init__(
        self,
        context: ModelContext,
        name: str,
        size: int,
        inner: int,
        *,
        bias: bool = False,
        fused: bool = False,
        activation: GatedActivation | None = None,
    ) -> None:
        """Take the weights from a checkpoint.

        Args:
            fused: the checkpoint holds gate and up as one `gate_up_proj`.
            activation: of the context's `Ops`; None: that of SiLU.
        """
        names, sizes = [f"{name}.gate_proj", f"{name}.up_proj"], [inner, inner]
        outputs = None
        if context.group.size > 1:
            span = equal_span(inner, context.group)
            outputs = [span, span.times(1, inner) if fused else span]
        if fused:
            num_parts = 1 if outputs is None else 2
            names, sizes = [f"{name}.gate_up_proj"] * num_parts, [2 * inner] * num_parts
        self.gate_up = Linear(context, names, size, sizes, bias=bias, outputs=outputs)
        self.down = RowLinear(context, f"{name}.down_proj", inner, size, bias=bias)
        self.activation = activation or context.ops.silu_and_mul
        weight = self.gate_up.weight
        if activation is None and isinstance(weight, GateableWeight) and weight.fuse_silu_and_mul():
            self.activation = _done
            logger.debug("%s: the product of gate and up ends with the activation", name)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, size] -> [T, size]."""
        return self.down(self.activation(self.gate_up(x)))


def _done(gate_up: Tensor) -> Tensor:
    """The activation of a product that has ended with it."""
    return gate_up
