"""Mixture of experts: a router chooses a few of many small MLPs for each token.

With several ranks each has a part of every expert's width, so that all have the same work whatever the router says.
"""

# Shapes: T tokens, E experts, k active ones of a token, N width of an expert (of this rank).

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..weights.reader import Slice
from .linear import Linear
from .spans import equal_span

if TYPE_CHECKING:
    from ...runtime.model_files.model_spec import ExpertsSpec
    from ..model_context import ModelContext


class SparseMLP:
    """sum over the active experts e of p_e(x) * down_e(silu(gate_e(x)) * up_e(x)), with p the router's softmax."""

    def __init__(self, context: ModelContext, name: str, size: int, experts: ExpertsSpec) -> None:
        self.router = Linear(context, [f"{name}.gate"], size, [experts.num_experts], bias=False)
        self.num_active, self.normalise = experts.num_active, experts.normalise
        self.route = context.ops.route
        inner, each = experts.intermediate_size, range(experts.num_experts)
        span = equal_span(inner, context.group)
        gate_up = context.linear_format.dense(
            context.weights,
            [f"{name}.experts.{e}.{part}_proj" for e in each for part in ("gate", "up")],
            [(inner, size)] * (2 * experts.num_experts),
            slices=[Slice(0, *span)] * (2 * experts.num_experts),
        )
        # Stacked along their first axis, which is not the one that is cut.
        down = context.linear_format.dense(
            context.weights,
            [f"{name}.experts.{e}.down_proj" for e in each],
            [(size, inner)] * experts.num_experts,
            slices=[Slice(1, *span)] * experts.num_experts,
        )
        self.experts = context.ops.pack_experts(
            gate_up.view(experts.num_experts, 2 * len(span), size),
            down.view(experts.num_experts, size, len(span)),
        )
        self._all_reduce = context.group.all_reduce

    def __call__(self, x: Tensor) -> Tensor:
        """[T, size] -> [T, size]."""
        shares, expert_ids = self.route(self.router(x), self.num_active, normalise=self.normalise)
        return self._all_reduce(self.experts(x, shares, expert_ids))
