"""Gemma 1, 2 and 3 (Gemma Team 2024, 2025).

Differences to Llama: embeddings are multiplied by sqrt(hidden size); attention and MLP have a norm before and after
them, with weights around zero; each head of q and of k has a norm; scores have a scale of their own; GELU. Five of six
layers have a sliding window and another rotary base; both are in the `ModelSpec`. Gemma 2 has no norms of heads and
one rotary base; its scores and logits are capped. Gemma 1 has norms before attention and MLP only, and no windows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..layers.attention import SelfAttention
from ..layers.decoder import Decoder, DecoderEnds, LayerRotary
from ..layers.embedding import Embedding
from ..layers.layer import Layer
from ..layers.mlp import GatedMLP
from ..layers.norm import UnitOffsetRMSNorm

if TYPE_CHECKING:
    from ..model_context import ModelContext


def build(context: ModelContext) -> Decoder:
    """Build the decoder."""
    spec = context.spec
    # Rounded to the serving dtype, as in training.
    scale = torch.tensor(spec.hidden_size**0.5, dtype=context.dtype).item()
    ends = DecoderEnds.of(
        context,
        lambda: Embedding(context, "model.embed_tokens", spec.vocab_size, spec.hidden_size, scale=scale),
        lambda: UnitOffsetRMSNorm(context, "model.norm", spec.hidden_size, spec.rms_norm_eps),
    )
    return Decoder(
        ends,
        LayerRotary(context),
        [_layer(context, layer_id) for layer_id in range(spec.num_layers)],
        context.ops.add,
        context.ops.take_rows,
    )


def _layer(context: ModelContext, layer_id: int) -> Layer:
    spec = context.spec
    name = spec.layer_name(layer_id)

    def norm(part: str, size: int = spec.hidden_size) -> UnitOffsetRMSNorm:
        return UnitOffsetRMSNorm(context, f"{name}.{part}", size, spec.rms_norm_eps)

    qk_norms = None
    if spec.form.qk_norm:
        qk_norms = norm("self_attn.q_norm", spec.head_dim), norm("self_attn.k_norm", spec.head_dim)
    before, after, *around_mlp = map(norm, spec.form.norms)
    before_mlp, after_mlp = around_mlp or (after, None)
    return Layer(
        context.ops.add,
        attention_norm=before,
        attention=SelfAttention(context, f"{name}.self_attn", layer_id, qk_norms=qk_norms),
        after_attention_norm=after if around_mlp else None,
        mlp_norm=before_mlp,
        mlp=GatedMLP(
            context,
            f"{name}.mlp",
            spec.hidden_size,
            spec.intermediate_size,
            activation=context.ops.gelu_and_mul,
        ),
        after_mlp_norm=after_mlp,
    )
