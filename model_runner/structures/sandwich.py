"""Norms before and after attention and the MLP (GLM-4-0414)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layers.decoder_parts import DecoderParts
from ..layers.layer import Layer

if TYPE_CHECKING:
    from ..layers.decoder import Decoder
    from ..model_context import ModelContext


def build(context: ModelContext) -> Decoder:
    """Build the decoder."""
    parts = DecoderParts(context)
    return parts.decoder(
        [
            Layer(
                context.ops.add,
                attention_norm=parts.layer_norm(layer_id, 0),
                attention=parts.attention(layer_id),
                after_attention_norm=parts.layer_norm(layer_id, 1),
                mlp_norm=parts.layer_norm(layer_id, 2),
                mlp=parts.gated_mlp(layer_id),
                after_mlp_norm=parts.layer_norm(layer_id, 3),
            )
            for layer_id in range(context.spec.num_layers)
        ]
    )
