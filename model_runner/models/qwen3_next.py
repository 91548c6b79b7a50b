"""Qwen3-Next (Qwen Team 2025): gated delta nets, in every fourth layer attention with an output gate; experts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ...runtime.model_files.weight_files.needed_tensors import is_unused
from ..layers.decoder import PreNormLayer
from ..layers.decoder_parts import DecoderParts
from ..layers.state_layers.delta_net import GatedDeltaNet

if TYPE_CHECKING:
    from ..layers.decoder import Decoder
    from ..model_context import ModelContext


def build(context: ModelContext) -> Decoder:
    """Build a decoder with pre-norm layers; those without attention have a delta net in its place."""
    context.weights.ignore_where(partial(is_unused, context.spec))
    parts = DecoderParts(context)
    return parts.decoder([_layer(context, parts, layer_id) for layer_id in range(context.spec.num_layers)])


def _layer(context: ModelContext, parts: DecoderParts, layer_id: int) -> PreNormLayer:
    if context.spec.attends(layer_id):
        return parts.pre_norm_layer(layer_id)
    return PreNormLayer(
        parts.layer_norm(layer_id, 0),
        GatedDeltaNet(context, f"model.layers.{layer_id}.linear_attn", layer_id),
        parts.layer_norm(layer_id, 1),
        parts.mlp(layer_id),
    )
