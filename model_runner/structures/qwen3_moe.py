"""Qwen3-MoE (Yang et al. 2025): Qwen3 with a mixture of experts in place of most or all MLPs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ..layers.experts import build_mlp
from .qwen3 import build_decoder

if TYPE_CHECKING:
    from ..layers.decoder import Decoder
    from ..model_context import ModelContext


def build(context: ModelContext) -> Decoder:
    """Build the decoder; layers have experts, except the dense ones named in the configuration."""
    return build_decoder(context, partial(build_mlp, context))
