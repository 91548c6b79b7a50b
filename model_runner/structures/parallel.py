"""Attention and MLP in parallel, after one norm (Command R, Cohere 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layers.decoder_parts import DecoderParts
from ..layers.layer import Layer, ParallelBlocks

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
                attention=ParallelBlocks(
                    parts.attention(layer_id), parts.gated_mlp(layer_id), context.ops.add
                ),
            )
            for layer_id in range(context.spec.num_layers)
        ]
    )
