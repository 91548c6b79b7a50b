"""Gemma 3n, text only: attention, heads and inputs of layers as in Gemma 4, with several residual streams, a learned
residual beside attention, and sparse gates in the first layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layers.streams.altup import AltUpLayer, AltUpStreams, gated_activation
from ..layers.streams.layer_inputs import InputGate
from .gemma4_text import attention_of, mlp_of, norms_of, stream_decoder

if TYPE_CHECKING:
    from ..layers.streams.stream_decoder import StreamDecoder
    from ..model_context import ModelContext


def build(context: ModelContext) -> StreamDecoder:
    """Build the decoder."""
    return stream_decoder(context, AltUpStreams(context), _layer)


def _layer(context: ModelContext, layer_id: int) -> AltUpLayer:
    name = f"model.layers.{layer_id}"
    return AltUpLayer(
        context,
        name,
        norms_of(context, layer_id),
        attention_of(context, layer_id),
        mlp_of(context, layer_id, gated_activation(context, layer_id)),
        InputGate(context, name, layer_id),
    )
