"""Norms after attention and MLP instead of before (OLMo 2, Walsh et al. 2024; EXAONE 4)."""

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
                attention=parts.attention(layer_id),
                after_attention_norm=parts.layer_norm(layer_id, 0),
                mlp=parts.gated_mlp(layer_id),
                after_mlp_norm=parts.layer_norm(layer_id, 1),
            )
            for layer_id in range(context.spec.num_layers)
        ]
    )
