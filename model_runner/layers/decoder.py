"""The common frame of decoder-only models around their layers: embedding, rotary tables, final norm, head."""

# Shapes: T new tokens in the batch, W of them need logits (see `ForwardBatch`), R rotated dimensions of a head.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..forward_batch import FeaturedStates, StageStates
from .attention import SelfAttention
from .embedding import Embedding, OutputHead, head_weight, vocabulary_rows
from .layer import SelectRows, all_rows, rows_with_logits
from .rotary import RotaryEmbedding

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ..adapter_runs import AdapterRuns
    from ..forward_batch import ForwardBatch
    from ..model_context import ModelContext
    from ..ops.elementwise import AddOp, TakeRows
    from .layer import Layer
    from .norm import Norm


class DecoderEnds(NamedTuple):
    """Modules before the layers, on the first pipeline stage, and after them, on the last; None on the others."""

    embedding: Embedding | None
    norm: Norm | None
    head: OutputHead | None

    @classmethod
    def of(
        cls, context: ModelContext, make_embedding: Callable[[], Embedding], make_norm: Callable[[], Norm]
    ) -> DecoderEnds:
        """Build the ends that the context's stage has."""
        embedding = make_embedding() if context.stage.is_first else None
        if not context.stage.is_last:
            return cls(embedding, None, None)
        return cls(embedding, make_norm(), build_head(context, embedding))


class Decoder:
    """Token ids to hidden states to logits; see `CausalLM`. A pipeline stage has some of the layers, see `forward`.

    Attributes:
        feature_layers: layers after which the residual stream is a feature of each token, for a drafter; ascending.
        combine_features: [T, size] of each of these layers -> [T, F] for the drafter.
    """

    feature_layers: tuple[int, ...] = ()
    combine_features: Callable[[Sequence[Tensor]], Tensor]

    def __init__(
        self,
        ends: DecoderEnds,
        rotary: LayerRotary,
        layers: Sequence[Layer],
        add: AddOp,
        take_rows: TakeRows,
    ) -> None:
        self.embedding = ends.embedding
        self.rotary = rotary
        self.layers = layers
        self.norm = ends.norm
        self.head = ends.head
        self.add = add
        self.take_rows = take_rows
        self.combine_features = partial(torch.cat, dim=1)

    def forward(self, batch: ForwardBatch) -> Tensor | StageStates | FeaturedStates:
        """After the last layer's attention only the tokens that need logits are computed.

        If none does, the last layer only stores keys and values, which `stores_only` allows.
        A pipeline stage starts from `batch.incoming`, and all but the last one return what the next one starts from.
        Features of all tokens after the last layer are its result if all tokens need logits.
        """
        x, residual = self._begin(batch)
        angles = self.rotary.at(batch.positions if batch.rope_positions is None else batch.rope_positions)
        selects = select_last(len(self.layers), batch, self.take_rows)
        row_selections = selects if self.head is not None else repeat(all_rows, len(self.layers))
        features = []
        for layer_id, layer in enumerate(self.layers):
            if batch.wants_nothing and layer_id == len(self.layers) - 1:
                assert isinstance(layer.attention, SelfAttention), "see `stores_only`"
                normed, _ = layer.entered(layer.attention_norm, x, residual)
                layer.attention.store(normed, *angles[layer_id], batch)
                return residual[:0]
            x, residual = layer(x, residual, *angles[layer_id], batch, next(row_selections))
            if batch.images is not None:
                residual = batch.images.add_after(layer_id, residual)
            if layer_id in self.feature_layers:
                features.append(x + residual)  # `add` may overwrite the stream
        assert x is not None, "a model has layers"
        if self.head is None:
            return StageStates(x, residual)
        hidden = self.add(x, residual)
        return FeaturedStates(hidden, self.combine_features(features)) if features else hidden

    @property
    def stores_only(self) -> bool:
        """Whether there may be steps in which no token needs logits."""
        return isinstance(self.layers[-1].attention, SelfAttention)

    def _begin(self, batch: ForwardBatch) -> tuple[Tensor | None, Tensor]:
        if self.embedding is None:
            assert batch.incoming is not None, "the stage before has sent nothing"
            return batch.incoming.x, batch.incoming.residual
        adapters = batch.adapters
        embedded = self.embedding(batch.input_ids, None if adapters is None else adapters.tokens)
        if batch.images is not None:
            embedded = batch.images.place(embedded)
        return None, embedded

    def final_states(self, hidden: Tensor) -> Tensor:
        assert self.norm is not None, "only the last pipeline stage has a norm after its layers"
        return self.norm(hidden)

    def logits(self, hidden: Tensor, adapters: AdapterRuns | None = None) -> Tensor:
        assert self.head is not None, "only the last pipeline stage has a head"
        return self.head(self.final_states(hidden), adapters)

    def write_logits(self, hidden: Tensor, adapters: AdapterRuns | None, out: Tensor) -> None:
        assert self.head is not None, "only the last pipeline stage has a head"
        self.head.write(self.final_states(hidden), adapters, out)

    @property
    def logits_dtype(self) -> torch.dtype:
        return torch.float32 if self.head is None else self.head.dtype


def select_last(num_layers: int, batch: ForwardBatch, take_rows: TakeRows) -> Iterator[SelectRows]:
    """The rows that each layer keeps: all of them, and in the last layer those that need logits."""
    return chain(repeat(all_rows, num_layers - 1), [rows_with_logits(batch, take_rows)])


class LayerRotary:
    """The rotary angles of each layer: one table, or one for the windowed layers and one for the others.

    Layers that do not rotate have none.
    """

    def __init__(self, context: ModelContext) -> None:
        spec = context.spec
        whole = next((n for n in spec.attention_layers if spec.window_of(n) is None), 0)
        self._tables = [RotaryEmbedding.of(context, spec.heads_of(whole).head_dim)]
        self._table_of_layer = [0] * spec.num_layers
        if spec.windows is not None and spec.windows.rope_theta is not None:
            self._tables.append(RotaryEmbedding.local(context))
            self._table_of_layer = [int(spec.window_of(n) is not None) for n in range(spec.num_layers)]
        self._rotates = [spec.rotates(layer_id) for layer_id in range(spec.num_layers)]
        self._no_angles = torch.empty((0,), dtype=context.dtype, device=context.device)

    def at(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """cos and sin for each layer at [T] int64 positions: [T, R] each, [T, 0] if it does not rotate.

        `positions`: or [A, T], with axes.
        """
        angles = [table.at(positions) for table in self._tables]
        none = self._no_angles.expand(positions.shape[-1], 0)
        return [
            angles[table] if rotates else (none, none)
            for table, rotates in zip(self._table_of_layer, self._rotates, strict=True)
        ]


def build_head(context: ModelContext, embedding: Embedding | None) -> OutputHead:
    """Build the output head from the checkpoint, or from the embedding if they are tied.

    `embedding`: None on a pipeline stage without one; then a tied head reads the table itself.
    """
    spec, weights, name = context.spec, context.weights, "lm_head"
    if spec.tie_word_embeddings:
        weights.ignore("lm_head.weight")  # some checkpoints store the tied weight twice
        if embedding is not None:
            assert embedding.head is not None
            return OutputHead(context, embedding.head)
        name = "model.embed_tokens"
    size = spec.hidden_size
    rows = partial(vocabulary_rows, context, f"{name}.weight", spec.vocab_size, size)
    return OutputHead(context, head_weight(context, name, size, rows))
