"""Mixture of experts: a router chooses a few of many small MLPs for each token."""

# Shapes: T tokens, E experts, k active ones of a token, N width of an expert.

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .. import ops
from .linear import Linear

if TYPE_CHECKING:
    from ...runtime.model_files.model_spec import ExpertsSpec
    from ..weights.reader import WeightReader


class SparseMLP:
    """sum over the active experts e of p_e(x) * down_e(silu(gate_e(x)) * up_e(x)), with p the router's softmax."""

    def __init__(self, weights: WeightReader, name: str, size: int, experts: ExpertsSpec) -> None:
        self.router = Linear(weights, [f"{name}.gate"], size, [experts.num_experts], bias=False)
        self.num_active, self.normalise = experts.num_active, experts.normalise
        inner, each = experts.intermediate_size, range(experts.num_experts)
        gate_up = weights.stacked(
            [f"{name}.experts.{e}.{part}_proj.weight" for e in each for part in ("gate", "up")],
            [(inner, size)] * (2 * experts.num_experts),
        )
        down = weights.stacked(
            [f"{name}.experts.{e}.down_proj.weight" for e in each], [(size, inner)] * experts.num_experts
        )
        self.experts = ops.ExpertWeights(
            gate_up.view(experts.num_experts, 2 * inner, size), down.view(experts.num_experts, size, inner)
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[T, size] -> [T, size]."""
        probs, expert_ids = ops.route(self.router(x), self.num_active, normalise=self.normalise)
        return ops.sparse_mlp(x, self.experts, probs, expert_ids)
