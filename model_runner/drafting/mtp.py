"""`MTPHead`: the layer with which a checkpoint predicts further tokens, see `MTPSpec`; a `DraftHead`."""

# Shapes: T or n tokens, K hidden size.

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from ..attention.backend import StepAttention
from ..forward_batch import ForwardBatch
from ..layers.attention import SelfAttention
from ..layers.decoder import Decoder
from ..layers.decoder_parts import DecoderParts
from ..layers.latent_attention import LatentAttention
from ..layers.layer import all_rows
from ..layers.linear import Linear
from ..layers.rotary import RotaryEmbedding

if TYPE_CHECKING:
    from torch import Tensor

    from ..memory.kv_pool import KVPool
    from ..model_context import ModelContext


class MTPWeights:
    """The modules, read from the checkpoint before there is a KV pool."""

    def __init__(self, context: ModelContext, model: Decoder) -> None:
        """`context`: of the model, whose spec has a layer in use."""
        mtp, spec = context.spec.mtp, context.spec.mtp_layer
        assert mtp is not None and spec is not None
        context = dataclasses.replace(context, spec=spec, adapters=None)
        parts = DecoderParts(context)
        self.spec, self.model, self.feeds_normed = spec, model, mtp.feeds_normed
        self.embedding_norm, self.hidden_norm, self.head_norm = (parts.norm(name) for name in mtp.norms)
        size = spec.hidden_size
        self.projection = Linear(context, [mtp.projection], 2 * size, [size], bias=False)
        latent = None
        if spec.latent is not None:
            latent = LatentAttention(context, f"{spec.layer_name(0)}.self_attn", 0)
        self.layer = parts.pre_norm_layer(0, latent)
        self.rotary = RotaryEmbedding.of(context)
        self.add = context.ops.add


class MTPHead:
    """See the module."""

    def __init__(self, weights: MTPWeights, kv: KVPool) -> None:
        """`kv`: of the layer."""
        self._weights, self._kv = weights, kv
        attention = weights.layer.attention
        assert isinstance(attention, SelfAttention | LatentAttention) and weights.layer.attention_norm
        self._attention, self._attention_norm = attention, weights.layer.attention_norm

    def features_of(self, states: Tensor) -> Tensor:
        return self._weights.model.final_states(states)

    def store(self, features: Tensor, token_ids: Tensor, positions: Tensor, out_cache_loc: Tensor) -> None:
        """The layer's keys and values need none of the pairs before, so no attention."""
        batch = self._batch(token_ids, positions, out_cache_loc, _NO_ATTENTION)
        x = self._attention_norm(self._joined(features, token_ids))
        self._attention.store(x, *self._weights.rotary.at(positions), batch)

    def predict(
        self,
        features: Tensor,
        token_ids: Tensor,
        positions: Tensor,
        out_cache_loc: Tensor,
        attention: StepAttention,
    ) -> tuple[Tensor, Tensor]:
        weights, head = self._weights, self._weights.model.head
        assert head is not None, "a model with drafts has no pipeline stages"
        batch = self._batch(token_ids, positions, out_cache_loc, attention)
        cos, sin = weights.rotary.at(positions)
        x, residual = weights.layer(None, self._joined(features, token_ids), cos, sin, batch, all_rows)
        hidden = weights.add(x, residual)
        normed = weights.head_norm(hidden)
        return normed if weights.feeds_normed else hidden, head(normed)

    def _joined(self, features: Tensor, token_ids: Tensor) -> Tensor:
        """[T, K] the layer's input."""
        weights = self._weights
        assert weights.model.embedding is not None
        embedded = weights.embedding_norm(weights.model.embedding(token_ids))
        return weights.projection(torch.cat((embedded, weights.hidden_norm(features)), dim=-1))

    def _batch(
        self, token_ids: Tensor, positions: Tensor, out_cache_loc: Tensor, attention: StepAttention
    ) -> ForwardBatch:
        return ForwardBatch(
            input_ids=token_ids,
            positions=positions,
            kv_pool=self._kv,
            out_cache_loc=out_cache_loc,
            attention=attention,
        )


class _NoAttention:
    """Attention of a batch that only stores."""

    def forward(
        self, layer_id: int, q: Tensor, sinks: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        raise AssertionError("keys and values are stored without attention")


_NO_ATTENTION = _NoAttention()
