"""Gemma 4, text only.

Differences to Gemma 3: weights of norms are around one; heads of v have a norm, too; layers without a window have heads
of another size, and may take their keys as values; the last layers may attend to keys and values of earlier ones; each
layer may have an input of its own and has a factor of its result.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from ...models.weight_files.needed_tensors import is_unused
from ..layers.attention import SelfAttention
from ..layers.decoder import LayerRotary, build_head
from ..layers.embedding import Embedding
from ..layers.layer_structures import SandwichLayer
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.streams.layer_inputs import InputGate, LayerInputs
from ..layers.streams.stream_decoder import OneStream, ScaledLayer, StreamDecoder

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..layers.streams.stream_decoder import StreamLayer, Streams
    from ..model_context import ModelContext
    from ..ops.elementwise import GatedActivation


def build(context: ModelContext) -> StreamDecoder:
    """Build the decoder."""
    return stream_decoder(context, OneStream(), _layer)


def stream_decoder(
    context: ModelContext, streams: Streams, make_layer: Callable[[ModelContext, int], StreamLayer]
) -> StreamDecoder:
    """The model around its layers, also that of Gemma 3n."""
    spec = context.spec
    context.weights.ignore_where(partial(is_unused, spec))
    scale = torch.tensor(spec.hidden_size**0.5, dtype=context.dtype).item()  # rounded, as in training
    embedding = Embedding(context, "model.embed_tokens", spec.vocab_size, spec.hidden_size, scale=scale)
    return StreamDecoder(
        embedding,
        None if spec.layer_inputs is None else LayerInputs(context),
        streams,
        LayerRotary(context),
        [make_layer(context, layer_id) for layer_id in range(spec.num_layers)],
        RMSNorm(context, "model.norm", spec.hidden_size, spec.rms_norm_eps),
        build_head(context, embedding),
        context.ops.take_rows,
    )


def attention_of(context: ModelContext, layer_id: int) -> SelfAttention:
    """The attention of a layer; where it has no keys of its own, only q has a norm."""
    spec, name = context.spec, f"model.layers.{layer_id}.self_attn"
    q_size, k_size = spec.qk_norm_sizes(layer_id)
    q_norm = RMSNorm(context, f"{name}.q_norm", q_size, spec.rms_norm_eps)
    k_norm = RMSNorm(context, f"{name}.k_norm", k_size, spec.rms_norm_eps) if k_size else None
    return SelfAttention(context, name, layer_id, qk_norms=(q_norm, k_norm))


def mlp_of(context: ModelContext, layer_id: int, activation: GatedActivation) -> GatedMLP:
    """The MLP of a layer."""
    spec = context.spec
    width = spec.inner_size_of(layer_id)
    return GatedMLP(context, f"model.layers.{layer_id}.mlp", spec.hidden_size, width, activation=activation)


def norms_of(context: ModelContext, layer_id: int) -> tuple[RMSNorm, RMSNorm, RMSNorm, RMSNorm]:
    """The norms before and after attention, before and after the MLP."""
    spec = context.spec
    before, after, before_mlp, after_mlp = (
        RMSNorm(context, f"model.layers.{layer_id}.{name}", spec.hidden_size, spec.rms_norm_eps)
        for name in spec.form.norms
    )
    return before, after, before_mlp, after_mlp


def _layer(context: ModelContext, layer_id: int) -> ScaledLayer:
    name, ops = f"model.layers.{layer_id}", context.ops
    before, after, before_mlp, after_mlp = norms_of(context, layer_id)
    attention = attention_of(context, layer_id)
    mlp = mlp_of(context, layer_id, ops.gelu_and_mul)
    return ScaledLayer(
        SandwichLayer(before, attention, after, before_mlp, mlp, after_mlp),
        None if context.spec.layer_inputs is None else InputGate(context, name, layer_id),
        context.weights.tensor(f"{name}.layer_scalar", (1,), torch.float32).item(),
        ops.add,
        ops.scale,
    )
