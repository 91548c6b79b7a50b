"""Inputs of layers: each token has an embedding for each layer, which the layer adds through a gate.

The table of these embeddings is the largest tensor of a model: 4.7 GB in bfloat16 for Gemma 4 E2B. Only the rows of a
step's tokens are read, so it stays as the file has it: in blocks, or in the serving dtype without a packed copy.
"""

# Shapes: T new tokens in the batch, L layers, P size of an input.

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ....models.spec.streams_spec import LAYER_TABLE
from ..embedding import Embedding
from ..linear import Linear
from ..norm import RMSNorm

if TYPE_CHECKING:
    from torch import Tensor

    from ...adapter_runs import AdapterRuns
    from ...model_context import ModelContext

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
