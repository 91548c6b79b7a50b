"""Gemma 4 and Gemma 3n: Gemma 3's layers with inputs of their own.

Differences to Gemma 3: weights of norms are around one; heads of v have a norm, too; layers without a window have heads
of another size, and may take their keys as values; the last layers may attend to keys and values of earlier ones; each
layer may have an input of its own and has a factor of its result. Gemma 3n has several residual streams instead of one,
a learned residual beside attention, and sparse gates in the first layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..layers.altup import AltUpLayer, AltUpStreams, gated_activation
from ..layers.attention import SelfAttention
from ..layers.decoder import LayerRotary, build_head
from ..layers.embedding import Embedding
from ..layers.experts import ExpertsBesideMLP
from ..layers.layer import Layer
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.stream_decoder import InputGate, LayerInputs, ScaledLayer, StreamDecoder

if TYPE_CHECKING:
    from ..model_context import ModelContext
    from ..ops.elementwise import GatedActivation


def build(context: ModelContext) -> StreamDecoder:
    """Build the decoder."""
    spec = context.spec
    scale = torch.tensor(spec.hidden_size**0.5, dtype=context.dtype).item()  # rounded, as in training
    embedding = Embedding(context, "model.embed_tokens", spec.vocab_size, spec.hidden_size, scale=scale)
    make_layer = _scaled_layer if spec.streams.altup is None else _altup_layer
    return StreamDecoder(
        embedding,
        None if spec.streams.layer_inputs is None else LayerInputs(context),
        None if spec.streams.altup is None else AltUpStreams(context),
        LayerRotary(context),
        [make_layer(context, layer_id) for layer_id in range(spec.num_layers)],
        RMSNorm(context, "model.norm", spec.hidden_size, spec.rms_norm_eps),
        build_head(context, embedding),
        context.ops.take_rows,
    )


def _attention(context: ModelContext, layer_id: int) -> SelfAttention:
    """The attention of a layer; where it has no keys of its own, only q has a norm."""
    spec, name = context.spec, f"model.layers.{layer_id}.self_attn"
    q_size, k_size = spec.qk_norm_sizes(layer_id)
    q_norm = RMSNorm(context, f"{name}.q_norm", q_size, spec.rms_norm_eps)
    k_norm = RMSNorm(context, f"{name}.k_norm", k_size, spec.rms_norm_eps) if k_size else None
    return SelfAttention(context, name, layer_id, qk_norms=(q_norm, k_norm))


def _mlp(context: ModelContext, layer_id: int, activation: GatedActivation) -> GatedMLP:
    """The MLP of a layer."""
    spec = context.spec
    width = spec.inner_size_of(layer_id)
    return GatedMLP(context, f"model.layers.{layer_id}.mlp", spec.hidden_size, width, activation=activation)


def _norms(context: ModelContext, layer_id: int) -> list[RMSNorm]:
    """The norms before and after attention, before and after the MLP, and those of `ExpertsBesideMLP`."""
    spec = context.spec
    return [
        RMSNorm(context, f"model.layers.{layer_id}.{name}", spec.hidden_size, spec.rms_norm_eps)
        for name in spec.form.norms
    ]


def _scaled_layer(context: ModelContext, layer_id: int) -> ScaledLayer:
    name, ops = f"model.layers.{layer_id}", context.ops
    before, after, before_mlp, after_mlp, *others = _norms(context, layer_id)
    attention = _attention(context, layer_id)
    dense = _mlp(context, layer_id, ops.gelu_and_mul)
    mlp: GatedMLP | ExpertsBesideMLP = dense
    if context.spec.experts is not None:
        after_dense, before_experts, after_experts = others
        norms = (before_mlp, after_dense), (before_experts, after_experts)
        mlp = ExpertsBesideMLP(context, name, context.spec.experts, dense, *norms)
    return ScaledLayer(
        Layer(
            ops.add,
            attention_norm=before,
            attention=attention,
            after_attention_norm=after,
            mlp_norm=before_mlp if mlp is dense else None,
            mlp=mlp,
            after_mlp_norm=after_mlp,
        ),
        None if context.spec.streams.layer_inputs is None else InputGate(context, name, layer_id),
        context.weights.tensor(f"{name}.layer_scalar", (1,), torch.float32).item(),
        ops.add,
        ops.scale,
    )


def _altup_layer(context: ModelContext, layer_id: int) -> AltUpLayer:
    name = f"model.layers.{layer_id}"
    return AltUpLayer(
        context,
        name,
        _norms(context, layer_id),
        _attention(context, layer_id),
        _mlp(context, layer_id, gated_activation(context, layer_id)),
        InputGate(context, name, layer_id),
    )
