"""Qwen3-MoE (Yang et al. 2025): Qwen3 with a mixture of experts in place of most or all MLPs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layers.experts import SparseMLP
from ..layers.mlp import GatedMLP
from .qwen3 import build_decoder

if TYPE_CHECKING:
    from ..layers.decoder import Decoder
    from ..model_context import ModelContext


def build(context: ModelContext) -> Decoder:
    """Build the decoder; layers have experts, except the dense ones named in the configuration."""
    spec = context.spec
    experts = spec.experts
    assert experts is not None

    def mlp(name: str, layer_id: int) -> GatedMLP | SparseMLP:
        if layer_id in experts.dense_layers:
            return GatedMLP(context, name, spec.hidden_size, spec.intermediate_size)
        return SparseMLP(context, name, spec.hidden_size, experts)

    return build_decoder(context, mlp)
