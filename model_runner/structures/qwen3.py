"""Qwen3 (Yang et al. 2025): Llama's layers with a norm for each head of q and of k."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layers.attention import SelfAttention
from ..layers.decoder import Decoder, DecoderEnds, LayerRotary, PreNormLayer
from ..layers.embedding import Embedding
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..layers.decoder import MLP
    from ..model_context import ModelContext


def build(context: ModelContext) -> Decoder:
    """Build the decoder; every layer has a `GatedMLP`."""

    def mlp(name: str, layer_id: int) -> GatedMLP:
        return GatedMLP(context, f"{name}.mlp", context.spec.hidden_size, context.spec.intermediate_size)

    return build_decoder(context, mlp)


def build_decoder(context: ModelContext, mlp: Callable[[str, int], MLP]) -> Decoder:
    """Build Qwen3's decoder; `mlp` makes the MLP of a layer from the layer's name and id."""
    spec = context.spec
    size, eps = spec.hidden_size, spec.rms_norm_eps
    ends = DecoderEnds.of(
        context,
        lambda: Embedding(context, "model.embed_tokens", spec.vocab_size, size),
        lambda: RMSNorm(context, "model.norm", size, eps),
    )
    layers = []
    for layer_id in range(spec.num_layers):
        name = spec.layer_name(layer_id)
        qk_norms = (
            RMSNorm(context, f"{name}.self_attn.q_norm", spec.head_dim, eps),
            RMSNorm(context, f"{name}.self_attn.k_norm", spec.head_dim, eps),
        )
        layers.append(
            PreNormLayer(
                RMSNorm(context, f"{name}.input_layernorm", size, eps),
                SelfAttention(context, f"{name}.self_attn", layer_id, qk_norms=qk_norms),
                RMSNorm(context, f"{name}.post_attention_layernorm", size, eps),
                mlp(name, layer_id),
            )
        )
    return Decoder(
        ends,
        LayerRotary(context),
        layers,
        context.ops.add,
        context.ops.take_rows,
    )
