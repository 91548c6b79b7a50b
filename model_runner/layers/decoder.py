"""What decoder-only models have in common around their layers: embedding, rotary tables, last norm, head."""

# Shapes: T new tokens in the batch, W of them wanted (see `ForwardBatch`), R numbers of a head that rotate.

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, Protocol

from .embedding import Embedding, OutputHead, head_weight, vocabulary_rows
from .rotary import RotaryEmbedding

if TYPE_CHECKING:
    from torch import Tensor

    from ..forward_batch import ForwardBatch
    from ..model_context import ModelContext
    from ..ops import AddOp, TakeRows
    from .norm import RMSNorm

Keep = Callable[["Tensor"], "Tensor"]
"""From rows of all tokens to those of the tokens that are computed further."""


def every_row(x: Tensor) -> Tensor:
    """The `Keep` of all layers but the last one."""
    return x


class Layer(Protocol):
    """One layer of a decoder; called with the angles of its kind of layer."""

    def __call__(
        self, x: Tensor | None, residual: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch, keep: Keep
    ) -> tuple[Tensor, Tensor]:
        """What the block before added, not yet in the residual stream (None at first) -> what this one adds.

        Args:
            keep: goes over attention's result and the residual stream, as soon as no other token looks at this one:
                behind attention itself.
        """
        ...


class PreNormLayer:
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(
        self,
        attention_norm: RMSNorm,
        attention: Callable[[Tensor, Tensor, Tensor, ForwardBatch, Keep], Tensor],
        mlp_norm: RMSNorm,
        mlp: Callable[[Tensor], Tensor],
    ) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(
        self, x: Tensor | None, residual: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch, keep: Keep
    ) -> tuple[Tensor, Tensor]:
        """See `Layer`."""
        if x is None:
            x = self.attention_norm(residual)
        else:
            x, residual = self.attention_norm.add(x, residual)
        x = self.attention(x, cos, sin, batch, keep)
        x, residual = self.mlp_norm.add(x, keep(residual))
        return self.mlp(x), residual


class Decoder:
    """Token ids to hidden states to logits; see `CausalLM`."""

    def __init__(
        self,
        embedding: Embedding,
        rotary: LayerRotary,
        layers: Sequence[Layer],
        norm: RMSNorm,
        head: OutputHead,
        add: AddOp,
        take_rows: TakeRows,
    ) -> None:
        self.embedding = embedding
        self.rotary = rotary
        self.layers = layers
        self.norm = norm
        self.head = head
        self.add = add
        self.take_rows = take_rows

    def forward(self, batch: ForwardBatch) -> Tensor:
        """See `CausalLM`. Behind the last layer's attention only the wanted tokens are computed."""
        residual = self.embedding(batch.input_ids)
        angles = self.rotary.at(batch.positions)
        keeps = chain(repeat(every_row, len(self.layers) - 1), [self._keep_wanted(batch)])
        x = None
        for layer, (cos, sin), keep in zip(self.layers, angles, keeps, strict=True):
            x, residual = layer(x, residual, cos, sin, batch, keep)
        assert x is not None, "a model has layers"
        return self.add(x, residual)

    def _keep_wanted(self, batch: ForwardBatch) -> Keep:
        wanted = batch.wanted
        return every_row if wanted is None else lambda x: self.take_rows(x.contiguous(), wanted)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM`."""
        return self.head(self.norm(hidden))


class LayerRotary:
    """The angles for each layer: one table, or one for the windowed layers and one for the others."""

    def __init__(self, context: ModelContext) -> None:
        spec = context.spec
        self._tables = [RotaryEmbedding.of(context)]
        self._table_of_layer = [0] * spec.num_layers
        if spec.local_rope_theta is not None:
            self._tables.append(RotaryEmbedding.local(context))
            self._table_of_layer = [int(spec.window_of(n) is not None) for n in range(spec.num_layers)]

    def at(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """cos and sin at [T] int64 positions for each layer: [T, R] each."""
        angles = [table.at(positions) for table in self._tables]
        return [angles[table] for table in self._table_of_layer]


def build_head(context: ModelContext, embedding: Embedding) -> OutputHead:
    """The head of a checkpoint, or one tied to the embedding."""
    spec, weights = context.spec, context.weights
    if spec.tie_word_embeddings:
        weights.ignore("lm_head.weight")  # some checkpoints hold the tied weight twice
        assert embedding.head is not None
        return OutputHead(context, embedding.head)
    size = spec.hidden_size
    rows = partial(vocabulary_rows, context, "lm_head.weight", spec.vocab_size, size)
    return OutputHead(context, head_weight(context, "lm_head", size, rows))
