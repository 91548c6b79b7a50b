"""`Eagle3Head`: an EAGLE-3 head, see `engine.models.eagle3_head` for its form and its names; a `FeatureHead`.

The model's step adds up the products of `fc` with its residual streams, so a feature has the head's hidden size.
Every rank has the whole head, so its drafts are equal on all of them.
"""

# Shapes: T new tokens in the batch, W of them need drafts, K hidden size of the head, N tokens that it can draft.

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING

import torch
from msgspec import structs

from ...runtime.errors import ConfigError
from ..layers.attention import SelfAttention
from ..layers.embedding import Embedding, OutputHead, head_weight, vocabulary_rows
from ..layers.layer import rows_with_logits
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.rotary import RotaryEmbedding
from ..model_context import ModelContext
from ..op_selection import Target, select_ops
from ..weights.linear_format import PlainFormat
from ..weights.reader import ModuleWeight, Slice, WeightReader
from ..weights.safetensors import SafetensorsStore

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from ...models.eagle3_head import Eagle3Spec
    from ..forward_batch import ForwardBatch
    from ..kernels.avoided import AvoidedKernels
    from ..layers.decoder import Decoder


class Eagle3Head:
    """An EAGLE-3 head with its weights.

    Attributes:
        dtype: of its weights and states.
        token_ids: [N] int64, the target's id of each token that the head can draft; None: it can draft all.
    """

    def __init__(self, context: ModelContext, head: Eagle3Spec, target: Decoder) -> None:
        """Take the weights from a checkpoint.

        Args:
            context: with the head's layer as its spec.
            head: the form of the head.
            target: lends its embedding and its output head to heads without.

        Raises:
            ConfigError: a tensor is missing, or `d2t` names tokens that the target does not have.
        """
        layer, weights, self.dtype = head.layer, context.weights, context.dtype
        hidden, name, body = layer.hidden_size, head.layer_name, head.body
        shape, size = (hidden, head.num_features), head.feature_size
        parts = [Slice(1, start, start + size) for start in range(0, head.num_features, size)]
        fc = ModuleWeight(weights, f"{body}fc", shape)
        # In parts, because their sum is made of operations that can be recorded, unlike features side by side.
        self._fc = [context.linear_format.load([fc._replace(part=part)]) for part in parts]
        norm = partial(RMSNorm, context, size=hidden, eps=layer.rms_norm_eps)
        self._input_norm, self._hidden_norm = norm(f"{name}.input_layernorm"), norm(f"{name}.hidden_norm")
        self._mlp_norm, self._norm = norm(f"{name}.post_attention_layernorm"), norm(f"{body}norm")
        self._attention = SelfAttention(context, f"{name}.self_attn", 0, input_size=2 * hidden)
        inner = layer.intermediate_size
        self._mlp = GatedMLP(context, f"{name}.mlp", hidden, inner, bias=layer.biases.mlp)
        self._rotary = RotaryEmbedding.of(context)
        self._add, self._take_rows = context.ops.add, context.ops.take_rows
        self._norm_before_residual = head.norm_before_residual
        assert target.embedding is not None and target.head is not None, "a pipeline stage drafts nothing"
        self._embedding, self._head = target.embedding, target.head
        if head.has_embedding:
            table = f"{body}embed_tokens"
            self._embedding = Embedding(context, table, layer.vocab_size, hidden, has_head=False)
        if head.has_head:
            self._head = _own_head(context, f"{head.beside}lm_head", head.draft_vocab_size)
        self.token_ids: Tensor | None = None
        if head.maps_tokens:
            self.token_ids = _target_ids(weights, f"{head.beside}d2t", head)

    def state(self, features: Sequence[Tensor]) -> Tensor:
        """Residual streams of the target, [T, size] of each layer -> [T, K] the feature."""
        first, *others = (weight(one, None) for weight, one in zip(self._fc, features, strict=True))
        for other in others:
            first = first + other
        return first

    def entered(self, features: Tensor) -> Tensor:
        return features

    def store(self, token_ids: Tensor, before: Tensor, batch: ForwardBatch) -> None:
        x, _ = self._joined(token_ids, before)
        self._attention.store(x, *self._rotary.at(batch.positions), batch)

    def predict(self, token_ids: Tensor, before: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        select_rows = rows_with_logits(batch, self._take_rows)
        x, normed = self._joined(token_ids, before)
        residual = normed if self._norm_before_residual else before
        cos, sin = self._rotary.at(batch.positions)
        x = self._attention(x, cos, sin, batch, select_rows)
        x, residual = self._mlp_norm.add(x, select_rows(residual))
        after = self._add(self._mlp(x), residual)
        return after, self._head(self._norm(after))

    def _joined(self, token_ids: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """[T, 2K] the input of attention, and its second half."""
        normed = self._hidden_norm(before)
        return torch.cat((self._input_norm(self._embedding(token_ids)), normed), dim=-1), normed


def load_eagle3_head(
    folder: Path,
    head: Eagle3Spec,
    target: Decoder,
    *,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    avoid: AvoidedKernels,
) -> Eagle3Head:
    """Load a head from its folder.

    Raises:
        ConfigError: the files are incomplete or damaged.
    """
    weights = WeightReader(SafetensorsStore(folder), dtype, device)
    ops = select_ops(Target(head.layer, device, dtype, avoid=avoid))
    context = ModelContext(
        spec=head.layer,
        weights=weights,
        linear_format=PlainFormat(ops.pack_linear),
        ops=ops,
        max_model_len=max_model_len,
        device=device,
    )
    found = Eagle3Head(context, head, target)
    weights.ignore_where(lambda name: name.endswith("t2d"))
    weights.finish()
    return found


def _own_head(context: ModelContext, name: str, size: int) -> OutputHead:
    """The head over the tokens that can be drafted."""
    context = dataclasses.replace(context, spec=structs.replace(context.spec, vocab_size=size))
    hidden = context.spec.hidden_size
    rows = partial(vocabulary_rows, context, f"{name}.weight", size, hidden)
    return OutputHead(context, head_weight(context, name, hidden, rows))


def _target_ids(weights: WeightReader, name: str, head: Eagle3Spec) -> Tensor:
    """The ids of the target, [N] int64: the file has their distances to 0, 1, ..., N - 1."""
    size, vocab_size = head.draft_vocab_size, head.layer.vocab_size
    offsets = weights.tensor(name, (size,), torch.int64)
    ids = offsets + torch.arange(size, device=offsets.device)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ConfigError(
            f"{weights.describe(name)}: {name} names the tokens {low} to {high}, but the target has 0 to "
            f"{vocab_size - 1}; use a head that was trained for this model"
        )
    return ids
