"""DeepSeek-V2 (DeepSeek-AI 2024): Llama's layers with latent attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layers.decoder import Decoder, LayerRotary, PreNormLayer, build_head
from ..layers.embedding import Embedding
from ..layers.latent_attention import LatentAttention
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
                LatentAttention(context, f"{name}.self_attn", layer_id),
                RMSNorm(context, f"{name}.post_attention_layernorm", size, eps),
                GatedMLP(context, f"{name}.mlp", size, spec.intermediate_size, bias=spec.mlp_bias),
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
