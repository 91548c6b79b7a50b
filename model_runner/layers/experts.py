"""Mixture of experts: a router selects a few of many small MLPs for each token.

With several ranks each rank has a part of every expert's width, so the work is balanced for any routing.
"""

# Shapes: T tokens, E experts, k active experts of a token, N width of an expert (of this rank).

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..ops import LinearWeight
from ..weights.reader import Slice
from .linear import Linear
from .spans import equal_span

if TYPE_CHECKING:
    from ...runtime.model_files.model_spec import ExpertsSpec
    from ..adapter_runs import AdapterRuns
    from ..model_context import ModelContext

_Request = tuple[list[str], list[tuple[int, int]], list[Slice] | None]
"""Arguments for a `LinearFormat`: names, shapes, and the slice of each weight (None: all of it)."""


class SparseMLP:
    """sum over the active experts e of p_e(x) * down_e(silu(gate_e(x)) * up_e(x)), with p the router's softmax."""

    def __init__(self, context: ModelContext, name: str, size: int, experts: ExpertsSpec) -> None:
        self.router = Linear(context, [f"{name}.gate"], size, [experts.num_experts], bias=False)
        self.num_active, self.normalize = experts.num_active, experts.normalize
        self.route = context.ops.route
        self.experts = context.ops.pack_experts(_CheckpointExperts(context, name, size, experts))
        self._all_reduce = context.group.all_reduce

    def __call__(self, x: Tensor, adapters: AdapterRuns | None = None) -> Tensor:
        """[T, size] -> [T, size]; adapters do not change experts and router."""
        shares, expert_ids = self.route(self.router(x), self.num_active, normalize=self.normalize)
        return self._all_reduce(self.experts(x, shares, expert_ids))


class _CheckpointExperts:
    """`ExpertSource` that reads this rank's part of a layer's experts from the checkpoint."""

    def __init__(self, context: ModelContext, name: str, size: int, experts: ExpertsSpec) -> None:
        self._format, self._weights = context.linear_format, context.weights
        self._modules = [f"{name}.experts.{expert}" for expert in range(experts.num_experts)]
        self._size, self._inner = size, experts.intermediate_size
        self._span = equal_span(self._inner, context.group)

    def stacked(self) -> tuple[Tensor, Tensor]:
        """See `ExpertSource`."""
        num_experts, width = len(self._modules), len(self._span)
        gate_up = self._format.dense(self._weights, *self._gate_up(self._modules))
        down = self._format.dense(self._weights, *self._down(self._modules))
        return gate_up.view(num_experts, 2 * width, self._size), down.view(num_experts, self._size, width)

    def linears(self) -> tuple[list[LinearWeight], list[LinearWeight]]:
        """See `ExpertSource`."""
        load, weights = self._format.load, self._weights
        gate_up = [load(weights, *self._gate_up([module])) for module in self._modules]
        return gate_up, [load(weights, *self._down([module])) for module in self._modules]

    def _gate_up(self, modules: list[str]) -> _Request:
        names = [f"{module}.{part}_proj" for module in modules for part in ("gate", "up")]
        return names, [(self._inner, self._size)] * len(names), self._slices(0, len(names))

    def _down(self, modules: list[str]) -> _Request:
        # Stacked along the first axis, cut along the other one.
        names = [f"{module}.down_proj" for module in modules]
        return names, [(self._size, self._inner)] * len(names), self._slices(1, len(names))

    def _slices(self, axis: int, num: int) -> list[Slice] | None:
        return None if len(self._span) == self._inner else [Slice(axis, *self._span)] * num
