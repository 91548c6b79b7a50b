"""`MTPHead`: the layer with which a checkpoint predicts further tokens, see `MTPSpec`; a `FeatureHead`.

Features are the residual stream after the last layer. The layer is split over tensor-parallel ranks like the model's.
"""

# Shapes: T tokens, W of them need drafts, K hidden size.

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from ..layers.attention import SelfAttention
from ..layers.decoder_parts import DecoderParts
from ..layers.latent_attention import LatentAttention
from ..layers.layer import rows_with_logits
from ..layers.linear import Linear
from ..layers.rotary import RotaryEmbedding

if TYPE_CHECKING:
    from torch import Tensor

    from ..forward_batch import ForwardBatch
    from ..layers.decoder import Decoder
    from ..model_context import ModelContext


class MTPHead:
    """See the module."""

    token_ids: Tensor | None = None

    def __init__(self, context: ModelContext, model: Decoder) -> None:
        """Take the weights from a checkpoint. `context`: of the model, whose spec has a layer in use."""
        mtp, spec = context.spec.mtp, context.spec.mtp_layer
        assert mtp is not None and spec is not None
        assert model.embedding is not None and model.head is not None, "a pipeline stage drafts nothing"
        context = dataclasses.replace(context, spec=spec, adapters=None)
        parts = DecoderParts(context)
        self._model, self._feeds_normed = model, mtp.feeds_normed
        self._embedding, self._head = model.embedding, model.head
        self._embedding_norm, self._hidden_norm, self._head_norm = (parts.norm(name) for name in mtp.norms)
        size = spec.hidden_size
        self._projection = Linear(context, [mtp.projection], 2 * size, [size], bias=False)
        latent = None
        if spec.latent is not None:
            latent = LatentAttention(context, f"{spec.layer_name(0)}.self_attn", 0)
        self._layer = parts.pre_norm_layer(0, latent)
        attention, norm = self._layer.attention, self._layer.attention_norm
        assert isinstance(attention, SelfAttention | LatentAttention) and norm is not None
        self._attention, self._attention_norm = attention, norm
        self._rotary = RotaryEmbedding.of(context)
        self._add, self._take_rows = context.ops.add, context.ops.take_rows

    def entered(self, features: Tensor) -> Tensor:
        return self._model.final_states(features)

    def store(self, token_ids: Tensor, before: Tensor, batch: ForwardBatch) -> None:
        x = self._attention_norm(self._joined(token_ids, before))
        self._attention.store(x, *self._rotary.at(batch.positions), batch)

    def predict(self, token_ids: Tensor, before: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary.at(batch.positions)
        select_rows = rows_with_logits(batch, self._take_rows)
        joined = self._joined(token_ids, before)
        hidden = self._add(*self._layer(None, joined, cos, sin, batch, select_rows))
        normed = self._head_norm(hidden)
        return normed if self._feeds_normed else hidden, self._head(normed)

    def _joined(self, token_ids: Tensor, before: Tensor) -> Tensor:
        """[T, K] the layer's input."""
        embedded = self._embedding_norm(self._embedding(token_ids))
        return self._projection(torch.cat((embedded, self._hidden_norm(before)), dim=-1))
