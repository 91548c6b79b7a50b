"""Llama (Touvron et al. 2023, Llama 3: 2024), and models of the same shape such as SmolLM2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layers.decoder_parts import llama_decoder

if TYPE_CHECKING:
    from ..layers.decoder import Decoder
    from ..model_context import ModelContext


def build(context: ModelContext) -> Decoder:
    """Build a decoder with pre-norm layers of attention and a SiLU-gated MLP."""
    return llama_decoder(context)
