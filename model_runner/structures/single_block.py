"""A single block in each layer: Mamba 2, attention, an MLP with squared ReLU, or experts (Nemotron-H, NVIDIA 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layers.decoder_parts import DecoderParts
from ..layers.layer import Layer
from ..layers.mamba2 import Mamba2

if TYPE_CHECKING:
    from ..layers.decoder import Decoder
    from ..model_context import ModelContext


def build(context: ModelContext) -> Decoder:
    """Build a decoder in which each layer is a norm and one block."""
    spec, parts = context.spec, DecoderParts(context)

    def layer(layer_id: int) -> Layer:
        norm = parts.layer_norm(layer_id, 0)
        if spec.has_mlp(layer_id):
            dense = spec.experts is None
            mlp = parts.plain_mlp(layer_id, "relu2") if dense else parts.mlp(layer_id)
            return Layer(context.ops.add, mlp_norm=norm, mlp=mlp)
        if spec.attends(layer_id):
            return Layer(context.ops.add, attention_norm=norm, attention=parts.attention(layer_id))
        mamba = Mamba2(context, f"{spec.layer_name(layer_id)}.mamba", layer_id)
        return Layer(context.ops.add, attention_norm=norm, attention=mamba)

    return parts.decoder([layer(layer_id) for layer_id in range(spec.num_layers)])
