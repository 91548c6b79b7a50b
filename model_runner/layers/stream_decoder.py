"""`StreamDecoder`: the frame of decoders with inputs of layers, or with several residual streams.

Each token may have an embedding for each layer, which the layer adds through a gate (`LayerInputs`). The table of these
embeddings is the largest tensor of a model: 4.7 GB in bfloat16 for Gemma 4 E2B. Only the rows of a step's tokens are
read, so it stays as the file has it: in blocks, or in the serving dtype without a packed copy.
"""

# Shapes: T new tokens in the batch, W of them need logits (see `ForwardBatch`), L layers, P size of a layer's input.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...models.spec.streams_spec import LAYER_TABLE
from .decoder import select_last
from .embedding import Embedding
from .layer import kept_adapters
from .linear import Linear
from .norm import RMSNorm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ..adapter_runs import AdapterRuns
    from ..forward_batch import ForwardBatch
    from ..model_context import ModelContext
    from ..ops.elementwise import AddOp, Scale, TakeRows
    from .altup import AltUpStreams
    from .decoder import LayerRotary
    from .embedding import OutputHead
    from .layer import Layer, SelectRows
    from .norm import Norm


StreamLayer = Callable[
    ["Tensor", "Tensor | None", "Tensor", "Tensor", "ForwardBatch", "SelectRows"], "Tensor"
]
"""(streams, inputs, cos, sin, batch, select_rows) -> the residual streams of a token, [T, ...] -> [W, ...].

`inputs`: those of all layers, [T, L * P]; None: the model has none. `select_rows` is applied after attention, where the
other tokens are not read any more.
"""


@dataclass(slots=True, eq=False)
class ScaledLayer:
    """Attention and MLP between two norms each, the layer's input, and a factor of the whole residual stream."""

    inner: Layer
    gate: InputGate | None
    factor: float
    add: AddOp
    scale: Scale

    def __call__(
        self,
        streams: Tensor,
        inputs: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        select_rows: SelectRows,
    ) -> Tensor:
        x, residual = self.inner(None, streams, cos, sin, batch, select_rows)
        residual = self.add(x, residual)
        if self.gate is not None and inputs is not None:
            gated = self.gate(residual, select_rows(inputs), kept_adapters(batch, select_rows))
            residual = self.add(gated, residual)
        return residual if self.factor == 1.0 else self.scale(residual, self.factor)


@dataclass(slots=True, eq=False)
class StreamDecoder:
    """Token ids to hidden states to logits; see `CausalLM`.

    Attributes:
        streams: makes several residual streams of a token, and one of them again; None: there is one.
    """

    embedding: Embedding
    inputs: LayerInputs | None
    streams: AltUpStreams | None
    rotary: LayerRotary
    layers: Sequence[StreamLayer]
    norm: Norm
    head: OutputHead
    take_rows: TakeRows

    def forward(self, batch: ForwardBatch) -> Tensor:
        """After the last layer's attention only the tokens that need logits are computed."""
        tokens = None if batch.adapters is None else batch.adapters.tokens
        embedded = self.embedding(batch.input_ids, tokens)
        if batch.images is not None:
            embedded = batch.images.place(embedded)
        inputs = None if self.inputs is None else self.inputs(batch.input_ids, embedded, tokens)
        streams = embedded if self.streams is None else self.streams.begin(embedded, tokens)
        angles = self.rotary.at(batch.positions)
        row_selections = list(select_last(len(self.layers), batch, self.take_rows))
        for layer, (cos, sin), select_rows in zip(self.layers, angles, row_selections, strict=True):
            streams = layer(streams, inputs, cos, sin, batch, select_rows)
        if self.streams is None:
            return streams
        return self.streams.end(streams, kept_adapters(batch, row_selections[-1]))

    def final_states(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)

    def logits(self, hidden: Tensor, adapters: AdapterRuns | None = None) -> Tensor:
        return self.head(self.norm(hidden), adapters)

    def write_logits(self, hidden: Tensor, adapters: AdapterRuns | None, out: Tensor) -> None:
        self.head.write(self.norm(hidden), adapters, out)

    @property
    def logits_dtype(self) -> torch.dtype:
        return self.head.dtype


_HALF: float = 0.5**0.5  # the sum of two inputs of equal size has the size of one


class LayerInputs:
    """The inputs of all layers for the tokens of a step."""

    def __init__(self, context: ModelContext) -> None:
        """Take the table, and the projection of the first embedding, from the checkpoint."""
        spec, ops = context.spec, context.ops
        inputs, size = spec.streams.layer_inputs, spec.hidden_size
        assert inputs is not None
        self._size, width = inputs.size, spec.num_layers * inputs.size
        scale = torch.tensor(inputs.size**0.5, dtype=context.dtype).item()  # rounded, as in training
        self._table = Embedding(context, LAYER_TABLE, inputs.vocab_size, width, scale, has_head=False)
        self._bound = inputs.vocab_size if inputs.vocab_size < spec.vocab_size else None
        self._project = Linear(context, ["model.per_layer_model_projection"], size, [width], bias=False)
        # The projection is divided by the root of its inputs: that changes only what the norm's eps is compared with.
        self._norm = RMSNorm(
            context, "model.per_layer_projection_norm", inputs.size, spec.rms_norm_eps * size
        )
        self._add, self._scale, self._ids_below = ops.add, ops.scale, ops.ids_below

    def __call__(self, token_ids: Tensor, embedded: Tensor, adapters: AdapterRuns | None) -> Tensor:
        """[T] int64 and the embeddings of these tokens, [T, hidden] -> [T, L * P]; `adapters`: see `Linear`."""
        projected = self._project(embedded, adapters)
        normed = self._norm(projected.view(-1, self._size)).view(projected.shape)
        ids = token_ids if self._bound is None else self._ids_below(token_ids, self._bound)
        return self._scale(self._add(self._table(ids), normed), _HALF)


class InputGate:
    """norm(projection(gelu(gate(x)) * input)) of one layer."""

    def __init__(self, context: ModelContext, name: str, layer_id: int) -> None:
        """`name`: of the layer."""
        spec, inputs = context.spec, context.spec.streams.layer_inputs
        assert inputs is not None
        self._start, self._stop = layer_id * inputs.size, (layer_id + 1) * inputs.size
        self._gate = Linear(
            context, [f"{name}.per_layer_input_gate"], spec.hidden_size, [inputs.size], bias=False
        )
        self._projection = Linear(
            context, [f"{name}.per_layer_projection"], inputs.size, [spec.hidden_size], bias=False
        )
        self._norm = RMSNorm(
            context, f"{name}.post_per_layer_input_norm", spec.hidden_size, spec.rms_norm_eps
        )
        self._gelu_times = context.ops.gelu_times

    def __call__(self, x: Tensor, inputs: Tensor, adapters: AdapterRuns | None) -> Tensor:
        """[T, hidden] and the inputs of all layers [T, L * P] -> [T, hidden]."""
        gated = self._gelu_times(self._gate(x, adapters), inputs[:, self._start : self._stop])
        return self._norm(self._projection(gated, adapters))
