"""Llama (Touvron et al. 2023, Llama 3: 2024), and models of the same shape such as SmolLM2."""

# Shapes: T new tokens in the batch, n rows that need logits.

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layers.attention import SelfAttention
from ..layers.embedding import Embedding, OutputHead
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.rotary import RotaryEmbedding

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ...runtime.model_files.model_spec import ModelSpec
    from ..forward_batch import ForwardBatch
    from ..weights.reader import WeightReader


class LlamaLayer:
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, spec: ModelSpec, weights: WeightReader, layer_id: int) -> None:
        name, size, eps = f"model.layers.{layer_id}", spec.hidden_size, spec.rms_norm_eps
        self.attention_norm = RMSNorm(weights, f"{name}.input_layernorm", size, eps)
        self.attention = SelfAttention(weights, f"{name}.self_attn", spec, layer_id)
        self.mlp_norm = RMSNorm(weights, f"{name}.post_attention_layernorm", size, eps)
        self.mlp = GatedMLP(weights, f"{name}.mlp", size, spec.intermediate_size, bias=spec.mlp_bias)

    def __call__(
        self, x: Tensor | None, residual: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """What the block before added, not yet in the residual stream (None at first) -> what this one adds."""
        if x is None:
            x = self.attention_norm(residual)
        else:
            x, residual = self.attention_norm.add(x, residual)
        x = self.attention(x, cos, sin, batch)
        x, residual = self.mlp_norm.add(x, residual)
        return self.mlp(x), residual


class LlamaForCausalLM:
    """The decoder with its head."""

    def __init__(
        self, spec: ModelSpec, weights: WeightReader, max_model_len: int, device: torch.device
    ) -> None:
        self.embedding = Embedding(weights, "model.embed_tokens", spec.vocab_size, spec.hidden_size)
        self.rotary = RotaryEmbedding(spec, max_model_len, weights.dtype, device)
        self.layers = [LlamaLayer(spec, weights, layer_id) for layer_id in range(spec.num_layers)]
        self.norm = RMSNorm(weights, "model.norm", spec.hidden_size, spec.rms_norm_eps)
        if spec.tie_word_embeddings:
            weights.ignore("lm_head.weight")  # some checkpoints hold the tied weight twice
            self.head = OutputHead(self.embedding.table)
        else:
            self.head = OutputHead(weights.tensor("lm_head.weight", (spec.vocab_size, spec.hidden_size)))

    def forward(self, batch: ForwardBatch) -> Tensor:
        """See `CausalLM`."""
        residual = self.embedding(batch.input_ids)
        cos, sin = self.rotary.at(batch.positions)
        x = None
        for layer in self.layers:
            x, residual = layer(x, residual, cos, sin, batch)
        return residual if x is None else residual.add_(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM`."""
        return self.head(self.norm(hidden))
