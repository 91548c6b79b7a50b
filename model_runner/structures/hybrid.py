"""Llama's layers, in which a layer with a state takes the place of attention in most.

The state layers are gated delta nets (Qwen3-Next, Qwen3.5), Mamba 2 (Granite 4) or gated short convolutions (LFM2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layers.decoder_parts import DecoderParts
from ..layers.delta_net import GatedDeltaNet
from ..layers.mamba2 import Mamba2
from ..layers.short_conv import ShortConv

if TYPE_CHECKING:
    from ..layers.decoder import Decoder
    from ..model_context import ModelContext


def build(context: ModelContext) -> Decoder:
    """Build the decoder."""
    state, parts = context.spec.state, DecoderParts(context)
    if state is None:
        return parts.decoder([parts.pre_norm_layer(layer_id) for layer_id in range(context.spec.num_layers)])
    recurrent = GatedDeltaNet if state.delta is not None else Mamba2
    return parts.hybrid_decoder(state.module, ShortConv if state.recurrent is None else recurrent)
