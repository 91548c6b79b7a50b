"""Qwen3 (Yang et al. 2025): Llama's layers with a norm for each head of q and of k."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layers.attention import SelfAttention
from ..layers.decoder import Decoder, LayerRotary, PreNormLayer, build_head
from ..layers.embedding import Embedding
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from ...runtime.model_files.model_spec import ModelSpec
    from ..weights.reader import WeightReader


def build(spec: ModelSpec, weights: WeightReader, max_model_len: int, device: torch.device) -> Decoder:
    """Every layer has an ordinary MLP."""

    def mlp(name: str, layer_id: int) -> GatedMLP:
        return GatedMLP(weights, name, spec.hidden_size, spec.intermediate_size)

    return build_decoder(spec, weights, max_model_len, device, mlp)


def build_decoder(
    spec: ModelSpec,
    weights: WeightReader,
    max_model_len: int,
    device: torch.device,
    mlp: Callable[[str, int], Callable[[Tensor], Tensor]],
) -> Decoder:
    """Qwen3's decoder around MLPs of any kind, made by name and layer."""
    size, eps = spec.hidden_size, spec.rms_norm_eps
    embedding = Embedding(weights, "model.embed_tokens", spec.vocab_size, size)
    layers = []
    for layer_id in range(spec.num_layers):
        name = f"model.layers.{layer_id}"
        qk_norms = (
            RMSNorm(weights, f"{name}.self_attn.q_norm", spec.head_dim, eps),
            RMSNorm(weights, f"{name}.self_attn.k_norm", spec.head_dim, eps),
        )
        layers.append(
            PreNormLayer(
                RMSNorm(weights, f"{name}.input_layernorm", size, eps),
                SelfAttention(weights, f"{name}.self_attn", spec, layer_id, qk_norms=qk_norms),
                RMSNorm(weights, f"{name}.post_attention_layernorm", size, eps),
                mlp(f"{name}.mlp", layer_id),
            )
        )
    return Decoder(
        embedding,
        LayerRotary(spec, max_model_len, weights.dtype, device),
        layers,
        RMSNorm(weights, "model.norm", size, eps),
        build_head(spec, weights, embedding),
    )
