"""Qwen3-Next (Qwen Team 2025): gated delta nets, in every fourth layer attention with an output gate; experts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ...models.weight_files.needed_tensors import is_unused
from ..layers.decoder_parts import DecoderParts
from ..layers.state_layers.delta_net import GatedDeltaNet

if TYPE_CHECKING:
    from ..layers.decoder import Decoder
    from ..model_context import ModelContext


def build(context: ModelContext) -> Decoder:
    """Build a decoder with pre-norm layers; those without attention have a delta net in its place."""
    context.weights.ignore_where(partial(is_unused, context.spec))
    return DecoderParts(context).hybrid_decoder("linear_attn", GatedDeltaNet)
