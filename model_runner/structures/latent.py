"""Llama's layers with latent attention, and experts in most of them (DeepSeek-V2, DeepSeek-AI 2024).

Small models of these families have Llama's attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layers.decoder_parts import DecoderParts
from ..layers.latent_attention import LatentAttention

if TYPE_CHECKING:
    from ..layers.decoder import Decoder
    from ..model_context import ModelContext


def build(context: ModelContext) -> Decoder:
    """Build the decoder."""
    parts = DecoderParts(context)
    if context.spec.latent is None:
        return parts.decoder([parts.pre_norm_layer(layer_id) for layer_id in range(context.spec.num_layers)])
    layers = [
        parts.pre_norm_layer(
            layer_id, LatentAttention(context, f"{context.spec.layer_name(layer_id)}.self_attn", layer_id)
        )
        for layer_id in range(context.spec.num_layers)
    ]
    return parts.decoder(layers)
