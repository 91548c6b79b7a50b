"""LFM2 (Liquid AI 2025): layers of gated short convolutions, some layers of attention with norms of heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layers.decoder_parts import DecoderParts
from ..layers.state_layers.short_conv import ShortConv

if TYPE_CHECKING:
    from ..layers.decoder import Decoder
    from ..model_context import ModelContext


def build(context: ModelContext) -> Decoder:
    """Build a decoder with pre-norm layers; those without attention have a short convolution in its place."""
    return DecoderParts(context).hybrid_decoder("conv", ShortConv)
