"""A single block in each layer: Mamba 2, attention, an MLP with squared ReLU, or experts (Nemotron-H, NVIDIA 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layers.decoder_parts import DecoderParts
from ..layers.single_blocks import MixerLayer, MLPLayer
from ..layers.state_layers.mamba2 import Mamba2

if TYPE_CHECKING:
    from ..layers.decoder import Decoder, Layer
    from ..model_context import ModelContext


def build(context: ModelContext) -> Decoder:
    """Build a decoder in which each layer is a norm and one block."""
    spec, parts = context.spec, DecoderParts(context)

    def layer(layer_id: int) -> Layer:
        norm = parts.layer_norm(layer_id, 0)
        if spec.has_mlp(layer_id):
            dense = spec.experts is None
            return MLPLayer(norm, parts.plain_mlp(layer_id, "relu2") if dense else parts.mlp(layer_id))
        if spec.attends(layer_id):
            return MixerLayer(norm, parts.attention(layer_id))
        return MixerLayer(norm, Mamba2(context, f"{spec.layer_name(layer_id)}.mamba", layer_id))

    return parts.decoder([layer(layer_id) for layer_id in range(spec.num_layers)])
