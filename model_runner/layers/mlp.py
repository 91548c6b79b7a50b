"""Feed-forward blocks: act(gate) * up with gate and up in one matmul, or act(up)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..ops.deltas import GatedDelta
from ..ops.linear import GateableWeight, UngateableWeight
from .linear import Linear, RowLinear
from .spans import equal_span

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ..adapter_runs import AdapterRuns
    from ..model_context import ModelContext
    from ..ops.elementwise import ActivationKind, GatedActivation

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
        is_summed: bool = True,
    ) -> None:
        """Take the weights from a checkpoint.

        Args:
            fused: the checkpoint holds gate and up as one matrix.
            activation: an op of the context's `Ops`; None: `silu_and_mul`.
            is_summed: see `RowLinear`.
        """
        *parts, down = context.spec.form.mlp_names
        names, sizes = [f"{name}.{part}" for part in parts], [inner, inner]
        outputs = None
        if context.group.size > 1:
            span = equal_span(inner, context.group)
            outputs = [span, span.times(1, inner) if fused else span]
        if fused:
            num_parts = 1 if outputs is None else 2
            names, sizes = [f"{name}.{parts[0]}"] * num_parts, [2 * inner] * num_parts
        self.gate_up = Linear(context, names, size, sizes, bias=bias, outputs=outputs)
        self.down = RowLinear(context, f"{name}.{down}", inner, size, bias=bias, is_summed=is_summed)
        self.activation = activation or context.ops.silu_and_mul
        weight, delta = self.gate_up.weight, self.gate_up.delta
        # Gates and ups of a fused weight are in another order, in which a change of them must be computed, too.
        can_change = isinstance(delta, GatedDelta) and isinstance(weight, UngateableWeight) and not bias
        can_fuse = activation is None and (delta is None or can_change)
        self._changed: Callable[[Tensor, AdapterRuns], Tensor] = self._unfused
        if can_fuse and isinstance(weight, GateableWeight) and weight.fuse_silu_and_mul():
            self.activation = _done
            logger.debug("%s: the gate/up matmul applies the activation", name)
            if isinstance(delta, GatedDelta) and isinstance(weight, UngateableWeight):
                ungated, add_gated = weight.ungated, delta.add_gated
                self._changed = lambda x, adapters: add_gated(x, ungated(x), adapters)

    def __call__(self, x: Tensor, adapters: AdapterRuns | None = None) -> Tensor:
        """[T, size] -> [T, size]; `adapters`: see `Linear`."""
        if adapters is None:
            return self.down(self.activation(self.gate_up(x)))
        return self.down(self._changed(x, adapters), adapters)

    def _unfused(self, x: Tensor, adapters: AdapterRuns) -> Tensor:
        return self.activation(self.gate_up(x, adapters))


class PlainMLP:
    """down(act(up(x)))."""

    def __init__(
        self,
        context: ModelContext,
        up: str,
        down: str,
        size: int,
        inner: int,
        bias: bool,
        activation: ActivationKind,
        *,
        is_summed: bool = True,
    ) -> None:
        """Take the weights of the modules `up` and `down` from a checkpoint; `is_summed`: see `RowLinear`."""
        outputs = None if context.group.size == 1 else [equal_span(inner, context.group)]
        self.up = Linear(context, [up], size, [inner], bias=bias, outputs=outputs)
        self.down = RowLinear(context, down, inner, size, bias=bias, is_summed=is_summed)
        self._activate = context.ops.activate
        self._activation: ActivationKind = activation

    def __call__(self, x: Tensor, adapters: AdapterRuns | None = None) -> Tensor:
        """[T, size] -> [T, size]; `adapters`: see `Linear`."""
        return self.down(self._activate(self.up(x, adapters), self._activation), adapters)


def _done(gate_up: Tensor) -> Tensor:
    """Stands for the activation if the gate/up matmul has applied it already."""
    return gate_up
