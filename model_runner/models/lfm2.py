"""LFM2 (Liquid AI 2025): layers of gated short convolutions, some layers of attention with norms of heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layers.attention import SelfAttention
from ..layers.decoder import Decoder, LayerRotary, PreNormLayer, build_head
from ..layers.embedding import Embedding
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.short_conv import ShortConv

if TYPE_CHECKING:
    from ..model_context import ModelContext


def build(context: ModelContext) -> Decoder:
    """Build the decoder; the last norm has the name of one of the embedding."""
    spec = context.spec
    size, eps = spec.hidden_size, spec.rms_norm_eps
    embedding = Embedding(context, "model.embed_tokens", spec.vocab_size, size)
    layers = []
    for layer_id in range(spec.num_layers):
        name = f"model.layers.{layer_id}"
        layers.append(
            PreNormLayer(
                RMSNorm(context, f"{name}.operator_norm", size, eps),
                _mixer(context, name, layer_id),
                RMSNorm(context, f"{name}.ffn_norm", size, eps),
                GatedMLP(context, f"{name}.feed_forward", size, spec.intermediate_size),
            )
        )
    return Decoder(
        embedding,
        LayerRotary(context),
        layers,
        RMSNorm(context, "model.embedding_norm", size, eps),
        build_head(context, embedding),
        context.ops.add,
        context.ops.take_rows,
    )


def _mixer(context: ModelContext, name: str, layer_id: int) -> SelfAttention | ShortConv:
    spec = context.spec
    if not spec.attends(layer_id):
        return ShortConv(context, f"{name}.conv", layer_id)
    norms = (
        RMSNorm(context, f"{name}.self_attn.q_layernorm", spec.head_dim, spec.rms_norm_eps),
        RMSNorm(context, f"{name}.self_attn.k_layernorm", spec.head_dim, spec.rms_norm_eps),
    )
    return SelfAttention(context, f"{name}.self_attn", layer_id, qk_norms=norms)
