"""GLM-4.5 and 4.6 (Zhipu AI 2025): Llama with half of each head rotated, and experts after the first layers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ...models.weight_files.needed_tensors import is_unused
from ..layers.decoder_parts import llama_decoder

if TYPE_CHECKING:
    from ..layers.decoder import Decoder
    from ..model_context import ModelContext


def build(context: ModelContext) -> Decoder:
    """Build the decoder; layers that predict further tokens are not read."""
    context.weights.ignore_where(partial(is_unused, context.spec))
    return llama_decoder(context)
