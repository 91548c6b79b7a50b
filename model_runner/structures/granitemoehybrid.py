"""Granite 4 (IBM 2025): Granite 3's layers under other names, most of them with Mamba 2 in the place of attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layers.decoder_parts import DecoderParts
from ..layers.state_layers.mamba2 import Mamba2

if TYPE_CHECKING:
    from ..layers.decoder import Decoder
    from ..model_context import ModelContext


def build(context: ModelContext) -> Decoder:
    """Build a decoder with pre-norm layers; those without attention have a layer of Mamba 2 in its place."""
    return DecoderParts(context).hybrid_decoder("mamba", Mamba2)
