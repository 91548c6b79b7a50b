"""The common frame of encoders around their layers, and the parts of a layer: embeddings, attention, MLP, norms.

An encoder has the form of `CausalLM`, so that the runner treats it like a decoder, but gives hidden states only.
"""

# Shapes: T new tokens in the batch, W of them need hidden states (see `ForwardBatch`), P positions, D head dim.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...models.weight_files.encoder_tensors import NAMES, is_beside_encoder, prefix_of
from ..ops.rotation import RotaryStore
from .decoder import select_last
from .layer import SelectRows
from .linear import Linear, RowLinear
from .norm import LayerNorm

if TYPE_CHECKING:
    from ...models.spec.encoder_spec import EncoderActivation
    from ...models.weight_files.encoder_tensors import EncoderNames
    from ..adapter_runs import AdapterRuns
    from ..forward_batch import ForwardBatch
    from ..model_context import ModelContext
    from ..ops.elementwise import GatedActivation
    from ..ops.ops import Ops

Angles = tuple[Tensor, Tensor]


EncoderLayer = Callable[
    ["Tensor | None", Tensor, Tensor, Tensor, "ForwardBatch", SelectRows], "tuple[Tensor | None, Tensor]"
]
"""Called as `Layer`; an output of None is added to the residual stream already."""


@dataclass(slots=True, eq=False)
class Encoder:
    """Token ids to hidden states; see `CausalLM`.

    Attributes:
        embed: the input of the first layer, [T, hidden].
        angles: cos and sin of each layer at [T] positions.
        final_norm: of hidden states; None: there is none after the last layer's own.
    """

    context: ModelContext
    embed: Callable[[ForwardBatch], Tensor]
    angles: Callable[[Tensor], Sequence[Angles]]
    layers: Sequence[EncoderLayer]
    final_norm: LayerNorm | None

    def forward(self, batch: ForwardBatch) -> Tensor:
        """After the last layer's attention only the tokens that need hidden states are computed."""
        ops, residual = self.context.ops, self.embed(batch)
        row_selections = select_last(len(self.layers), batch, ops.take_rows)
        x: Tensor | None = None
        for layer, (cos, sin), select_rows in zip(
            self.layers, self.angles(batch.positions), row_selections, strict=True
        ):
            x, residual = layer(x, residual, cos, sin, batch, select_rows)
        return residual if x is None else ops.add(x, residual)

    def final_states(self, hidden: Tensor) -> Tensor:
        return hidden if self.final_norm is None else self.final_norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Raise: only a bug can ask an encoder for a next token."""
        raise NotImplementedError(f"{self.context.spec.model_type} is an encoder, which has no logits")

    def write_logits(self, hidden: Tensor, adapters: AdapterRuns | None, out: Tensor) -> None:
        """As `logits`."""
        self.logits(hidden)

    @property
    def logits_dtype(self) -> torch.dtype:
        return torch.float32


class EncoderParts:
    """Makes the parts of an encoder from the tensors of a checkpoint, whose names depend on the family."""

    def __init__(self, context: ModelContext) -> None:
        spec = context.spec
        assert spec.encoder is not None and context.group.size == 1
        self.context = context
        self.spec = spec.encoder
        self.names: EncoderNames = NAMES[spec.model_type]
        table = (spec.vocab_size, spec.hidden_size)
        self._prefix = prefix_of(self.names, lambda name: context.weights.shape(name, table) is not None)
        context.weights.ignore_where(partial(is_beside_encoder, prefix=self._prefix))

    def table(self, name: str, rows: int) -> Tensor:
        """A table of embeddings, [rows, hidden]."""
        return self.context.weights.tensor(
            f"{self._prefix}{name}.weight", (rows, self.context.spec.hidden_size)
        )

    def norm(self, name: str) -> LayerNorm:
        """A norm over the hidden size."""
        spec = self.context.spec
        return LayerNorm(
            self.context, self._prefix + name, spec.hidden_size, spec.rms_norm_eps, bias=self.spec.norm_bias
        )

    def attention(self, layer_id: int) -> EncoderAttention:
        """The attention of a layer."""
        layer = self._prefix + self.names.layer_name(layer_id)
        return EncoderAttention(
            self.context,
            [layer + name for name in self.names.qkv],
            layer + self.names.attention_out,
            layer_id,
        )

    def mlp(self, layer_id: int) -> EncoderMLP:
        """The MLP of a layer."""
        layer = self._prefix + self.names.layer_name(layer_id)
        return EncoderMLP(self.context, layer + self.names.mlp_in, layer + self.names.mlp_out)


class EncoderAttention:
    """o(attention(q(x), k(x), v(x))), with q, k and v in one matmul, and rotary if there are angles.

    The attention backend takes from the `ModelSpec` that a token attends to later ones, too, and the window.
    """

    def __init__(self, context: ModelContext, qkv_names: list[str], out_name: str, layer_id: int) -> None:
        spec = context.spec
        size = spec.hidden_size
        rows = [3 * size // len(qkv_names)] * len(qkv_names)
        self.layer_id = layer_id
        self.head_dim = spec.head_dim
        self.qkv = Linear(context, qkv_names, size, rows, bias=spec.biases.qkv)
        self.o = RowLinear(context, out_name, size, size, bias=spec.biases.attention_out)
        self._rotate_and_store = context.ops.rotate_and_store

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch, select_rows: SelectRows
    ) -> Tensor:
        """[T, hidden] -> [W, hidden]: only the kept rows of the attention output are projected."""
        qkv_THD = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        store = RotaryStore(cos, sin, batch.kv_pool.layer(self.layer_id), batch.out_cache_loc)
        q_THD = self._rotate_and_store(qkv_THD, None, store)
        return self.o(select_rows(batch.attention.forward(self.layer_id, q_THD)))


class EncoderMLP:
    """down(act(up(x))), or down(act(gate(x)) * up(x))."""

    def __init__(self, context: ModelContext, up_name: str, down_name: str) -> None:
        spec, encoder = context.spec, context.spec.encoder
        assert encoder is not None
        size, inner = spec.hidden_size, spec.intermediate_size
        wide = 2 * inner if encoder.gated_mlp else inner
        self.up = Linear(context, [up_name], size, [wide], bias=spec.biases.mlp)
        self.down = RowLinear(context, down_name, inner, size, bias=spec.biases.mlp)
        self.activation: Callable[[Tensor], Tensor]
        if encoder.gated_mlp:
            self.activation = _gated(context.ops, encoder.activation)
        else:
            activate, kind = context.ops.activate, encoder.activation
            self.activation = lambda x: activate(x, kind)

    def __call__(self, x: Tensor, adapters: AdapterRuns | None = None) -> Tensor:
        """[T, size] -> [T, size]; encoders have no adapters."""
        return self.down(self.activation(self.up(x)))


def _gated(ops: Ops, kind: EncoderActivation) -> GatedActivation:
    match kind:
        case "gelu":
            return ops.gelu_erf_and_mul
        case "gelu_tanh":
            return ops.gelu_and_mul
        case "silu":
            return ops.silu_and_mul
        case "relu":
            raise AssertionError("no family has a gated MLP with relu")


class LearnedPositions:
    """The sum of a token's own embedding, that of its position, and that of its type.

    Positions and type 0, which most texts have throughout, are added up in advance; with the same bits.
    """

    def __init__(self, parts: EncoderParts) -> None:
        context, encoder, names = parts.context, parts.spec, parts.names
        self._words = parts.table(names.words, context.spec.vocab_size)
        # The row of position 0 comes first, so positions are indices.
        self._positions = parts.table(names.positions, encoder.position_rows)[encoder.position_offset :]
        self._first_type = self._positions
        self._types: Tensor | None = None
        if encoder.token_types:
            self._types = parts.table(names.types, encoder.token_types)
            self._first_type = self._positions + self._types[0]
        self._ops = context.ops

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """[T, hidden]."""
        take_rows, add = self._ops.take_rows, self._ops.add
        if batch.token_types is None or self._types is None:
            rest = take_rows(self._first_type, batch.positions)
        else:
            rest = add(take_rows(self._types, batch.token_types), take_rows(self._positions, batch.positions))
        return add(rest, take_rows(self._words, batch.input_ids))


def no_angles(num_layers: int, context: ModelContext) -> Callable[[Tensor], Sequence[Angles]]:
    """The angles of a model without rotary positions: [T, 0] for each layer."""
    nothing = torch.empty((0,), dtype=context.dtype, device=context.device)

    def at(positions: Tensor) -> Sequence[Angles]:
        none = nothing.expand(positions.shape[0], 0)
        return [(none, none)] * num_layers

    return at
