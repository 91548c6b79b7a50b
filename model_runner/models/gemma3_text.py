"""Gemma 3, text only (Gemma Team 2025).

Differences to Llama: embeddings are multiplied by sqrt(hidden size); attention and MLP have a norm before and after
them, with weights around zero; each head of q and of k has a norm; scores have a scale of their own; GELU. Five of six
layers have a sliding window and another rotary base; both are in the `ModelSpec`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..layers.attention import SelfAttention
from ..layers.decoder import Decoder, LayerRotary, build_head
from ..layers.embedding import Embedding
from ..layers.mlp import GatedMLP
from ..layers.norm import UnitOffsetRMSNorm
from ..layers.row_selection import kept_adapters

if TYPE_CHECKING:
    from torch import Tensor

    from ..forward_batch import ForwardBatch
    from ..layers.row_selection import SelectRows
    from ..model_context import ModelContext


def build(context: ModelContext) -> Decoder:
    """Build the decoder, also that of Gemma 2."""
    spec = context.spec
    # Rounded to the serving dtype, as in training.
    scale = torch.tensor(spec.hidden_size**0.5, dtype=context.dtype).item()
    embedding = Embedding(context, "model.embed_tokens", spec.vocab_size, spec.hidden_size, scale=scale)
    return Decoder(
        embedding,
        LayerRotary(context),
        [Gemma3Layer(context, layer_id) for layer_id in range(spec.num_layers)],
        UnitOffsetRMSNorm(context, "model.norm", spec.hidden_size, spec.rms_norm_eps),
        build_head(context, embedding),
        context.ops.add,
        context.ops.take_rows,
    )


class Gemma3Layer:
    """Attention and MLP, each between two norms."""

    def __init__(self, context: ModelContext, layer_id: int) -> None:
        spec = context.spec
        name, size, eps = f"model.layers.{layer_id}", spec.hidden_size, spec.rms_norm_eps
        qk_norms = None
        if spec.qk_norm:
            qk_norms = (
                UnitOffsetRMSNorm(context, f"{name}.self_attn.q_norm", spec.head_dim, eps),
                UnitOffsetRMSNorm(context, f"{name}.self_attn.k_norm", spec.head_dim, eps),
            )
        self.attention_norm = UnitOffsetRMSNorm(context, f"{name}.input_layernorm", size, eps)
        self.attention = SelfAttention(context, f"{name}.self_attn", layer_id, qk_norms=qk_norms)
        self.after_attention_norm = UnitOffsetRMSNorm(context, f"{name}.post_attention_layernorm", size, eps)
        self.mlp_norm = UnitOffsetRMSNorm(context, f"{name}.pre_feedforward_layernorm", size, eps)
        self.mlp = GatedMLP(
            context, f"{name}.mlp", size, spec.intermediate_size, activation=context.ops.gelu_and_mul
        )
        self.after_mlp_norm = UnitOffsetRMSNorm(context, f"{name}.post_feedforward_layernorm", size, eps)

    def __call__(
        self,
        x: Tensor | None,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        select_rows: SelectRows,
    ) -> tuple[Tensor, Tensor]:
        """See `Layer`."""
        if x is None:
            x = self.attention_norm(residual)
        else:
            x, residual = self.attention_norm.add(x, residual)
        x = self.after_attention_norm(self.attention(x, cos, sin, batch, select_rows))
        x, residual = self.mlp_norm.add(x, select_rows(residual))
        return self.after_mlp_norm(self.mlp(x, kept_adapters(batch, select_rows))), residual
