"""LFM2 (Liquid AI 2025): layers of gated short convolutions, some layers of attention with norms of heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layers.decoder import PreNormLayer
from ..layers.decoder_parts import DecoderParts
from ..layers.state_layers.short_conv import ShortConv

if TYPE_CHECKING:
    from ..layers.decoder import Decoder
    from ..model_context import ModelContext


def build(context: ModelContext) -> Decoder:
    """Build a decoder with pre-norm layers; those without attention have a short convolution in its place."""
    parts = DecoderParts(context)
    return parts.decoder([_layer(context, parts, layer_id) for layer_id in range(context.spec.num_layers)])


def _layer(context: ModelContext, parts: DecoderParts, layer_id: int) -> PreNormLayer:
    if context.spec.attends(layer_id):
        return parts.pre_norm_layer(layer_id)
    return PreNormLayer(
        parts.layer_norm(layer_id, 0),
        ShortConv(context, f"model.layers.{layer_id}.conv", layer_id),
        parts.layer_norm(layer_id, 1),
        parts.mlp(layer_id),
    )
