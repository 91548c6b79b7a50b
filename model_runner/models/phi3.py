"""Phi-3 and Phi-4-mini (Abdin et al. 2024): Llama's layers; q, k, v are one matrix, gate and up another.

Long-context releases scale each rotary frequency separately (longrope), Phi-4-mini rotates only a part of each head,
and short-context releases have a sliding window. All of this is in the `ModelSpec`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layers.attention import SelfAttention
from ..layers.decoder import Decoder, LayerRotary, PreNormLayer, build_head
from ..layers.embedding import Embedding
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm

if TYPE_CHECKING:
    from ..model_context import ModelContext


def build(context: ModelContext) -> Decoder:
    """Build the decoder."""
    spec = context.spec
    size, eps = spec.hidden_size, spec.rms_norm_eps
    embedding = Embedding(context, "model.embed_tokens", spec.vocab_size, size)
    layers = []
    for layer_id in range(spec.num_layers):
        name = f"model.layers.{layer_id}"
        layers.append(
            PreNormLayer(
                RMSNorm(context, f"{name}.input_layernorm", size, eps),
                SelfAttention(context, f"{name}.self_attn", layer_id, fused=True),
                RMSNorm(context, f"{name}.post_attention_layernorm", size, eps),
                GatedMLP(context, f"{name}.mlp", size, spec.intermediate_size, fused=True),
            )
        )
    return Decoder(
        embedding,
        LayerRotary(context),
        layers,
        RMSNorm(context, "model.norm", size, eps),
        build_head(context, embedding),
        context.ops.add,
        context.ops.take_rows,
    )
