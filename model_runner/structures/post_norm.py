"""Norms after attention and MLP instead of before (OLMo 2, Walsh et al. 2024; EXAONE 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layers.decoder_parts import DecoderParts
from ..layers.layer_structures import PostNormLayer

if TYPE_CHECKING:
    from ..layers.decoder import Decoder
    from ..model_context import ModelContext


def build(context: ModelContext) -> Decoder:
    """Build the decoder."""
    parts = DecoderParts(context)
    return parts.decoder(
        [
            PostNormLayer(
                parts.attention(layer_id),
                parts.layer_norm(layer_id, 0),
                parts.gated_mlp(layer_id),
                parts.layer_norm(layer_id, 1),
                context.ops.add,
            )
            for layer_id in range(context.spec.num_layers)
        ]
    )
