"""StarCoder2 (Lozhkov et al. 2024): Llama's structure with layer norms, an MLP without gate, and biases everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layers.decoder import PreNormLayer
from ..layers.decoder_parts import DecoderParts

if TYPE_CHECKING:
    from ..layers.decoder import Decoder
    from ..model_context import ModelContext


def build(context: ModelContext) -> Decoder:
    """Build the decoder."""
    parts = DecoderParts(context)
    return parts.decoder(
        [
            PreNormLayer(
                parts.layer_norm(layer_id, 0),
                parts.attention(layer_id),
                parts.layer_norm(layer_id, 1),
                parts.plain_mlp(layer_id, "gelu_tanh"),
            )
            for layer_id in range(context.spec.num_layers)
        ]
    )
