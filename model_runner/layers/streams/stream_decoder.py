"""`StreamDecoder`: the frame of decoders with inputs of layers, or with several residual streams."""

# Shapes: T new tokens in the batch, W of them need logits (see `ForwardBatch`), L layers, P size of a layer's input.

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..decoder import select_last
from ..layer import kept_adapters

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from ...adapter_runs import AdapterRuns
    from ...forward_batch import ForwardBatch
    from ...ops.elementwise import AddOp, Scale, TakeRows
    from ..decoder import LayerRotary
    from ..embedding import Embedding, OutputHead
    from ..layer import Layer, SelectRows
    from ..norm import Norm
    from .layer_inputs import InputGate, LayerInputs


class StreamLayer(Protocol):
    """One layer; called with the rotary angles of its kind of layer."""

    def __call__(
        self,
        streams: Tensor,
        inputs: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        select_rows: SelectRows,
    ) -> Tensor:
        """The residual streams of a token, [T, ...] -> [W, ...].

        Args:
            inputs: those of all layers, [T, L * P]; None: the model has none.
            select_rows: applied after attention, where the other tokens are not read any more.
        """
        ...


class Streams(Protocol):
    """Makes the residual streams of a token, and one of them again."""

    def begin(self, embedded: Tensor, adapters: AdapterRuns | None) -> Tensor:
        """[T, hidden] -> [T, ...]."""
        ...

    def end(self, streams: Tensor, adapters: AdapterRuns | None) -> Tensor:
        """[W, ...] -> [W, hidden]."""
        ...


class OneStream:
    """The residual stream of most models."""

    def begin(self, embedded: Tensor, adapters: AdapterRuns | None) -> Tensor:
        return embedded

    def end(self, streams: Tensor, adapters: AdapterRuns | None) -> Tensor:
        return streams


class ScaledLayer:
    """Attention and MLP between two norms each, the layer's input, and a factor of the whole residual stream."""

    def __init__(self, inner: Layer, gate: InputGate | None, factor: float, add: AddOp, scale: Scale) -> None:
        self.inner = inner
        self.gate = gate
        self.factor = factor
        self._add, self._scale = add, scale

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
        residual = self._add(x, residual)
        if self.gate is not None and inputs is not None:
            gated = self.gate(residual, select_rows(inputs), kept_adapters(batch, select_rows))
            residual = self._add(gated, residual)
        return residual if self.factor == 1.0 else self._scale(residual, self.factor)


class StreamDecoder:
    """Token ids to hidden states to logits; see `CausalLM`."""

    def __init__(
        self,
        embedding: Embedding,
        inputs: LayerInputs | None,
        streams: Streams,
        rotary: LayerRotary,
        layers: Sequence[StreamLayer],
        norm: Norm,
        head: OutputHead,
        take_rows: TakeRows,
    ) -> None:
        self.embedding = embedding
        self.inputs = inputs
        self.streams = streams
        self.rotary = rotary
        self.layers = layers
        self.norm = norm
        self.head = head
        self._take_rows = take_rows

    def forward(self, batch: ForwardBatch) -> Tensor:
        """After the last layer's attention only the tokens that need logits are computed."""
        tokens = None if batch.adapters is None else batch.adapters.tokens
        embedded = self.embedding(batch.input_ids, tokens)
        inputs = None if self.inputs is None else self.inputs(batch.input_ids, embedded, tokens)
        streams = self.streams.begin(embedded, tokens)
        angles = self.rotary.at(batch.positions)
        row_selections = list(select_last(len(self.layers), batch, self._take_rows))
        for layer, (cos, sin), select_rows in zip(self.layers, angles, row_selections, strict=True):
            streams = layer(streams, inputs, cos, sin, batch, select_rows)
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
