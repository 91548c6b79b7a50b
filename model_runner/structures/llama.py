"""Llama's layers: a norm and attention, a norm and an MLP, which may be a mixture of experts (Touvron et al. 2023).

Biases, windows, rotary, norms of heads and factors are in the `ModelSpec` and its `LayerForm`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layers.decoder_parts import DecoderParts

if TYPE_CHECKING:
    from ..layers.decoder import Decoder
    from ..model_context import ModelContext


def build(context: ModelContext) -> Decoder:
    """Build the decoder."""
    parts = DecoderParts(context)
    return parts.decoder([parts.pre_norm_layer(layer_id) for layer_id in range(context.spec.num_layers)])
