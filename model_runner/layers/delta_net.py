"""Gated delta net (Yang et al. 2024; Qwen3-Next, Qwen3.5): a state layer in the place of attention."""

# Shapes: T new tokens in the batch, W of them kept; others: see `DeltaWeights`, of this rank.

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ..states.state_weights import DeltaWeights
from ..weights.reader import Slice
from .layer import kept_adapters
from .linear import Linear, RowLinear
from .spans import Span, equal_span

if TYPE_CHECKING:
    from torch import Tensor

    from ...models.spec.state_spec import DeltaSpec
    from ..distributed.tp_group import TPGroup
    from ..forward_batch import ForwardBatch
    from ..model_context import ModelContext
    from .layer import SelectRows

_Parts = Iterator[tuple[str, int, Span]]
"""Parts of a projection: its name, its number of outputs, and the outputs that are taken."""


class GatedDeltaNet:
    """out(norm(delta(conv(q, k, v), b, a)) * silu(z)); it has the form of `SelfAttention`.

    The small projections to b and a are a matmul of their own: their weights are stored in another format in most
    quantized files.
    """

    def __init__(self, context: ModelContext, name: str, layer_id: int) -> None:
        """Take the weights from a checkpoint; several ranks share the heads."""
        spec, state = context.spec, context.spec.state
        assert state is not None and state.delta is not None, "the model has delta nets"
        delta, group, weights = state.delta, context.group, context.weights
        self.layer_id = layer_id
        self.gated_delta = context.ops.gated_delta

        def linear(parts: _Parts) -> Linear:
            names, rows, outputs = zip(*parts, strict=True)
            return Linear(
                context,
                [f"{name}.{part}" for part in names],
                spec.hidden_size,
                list(rows),
                bias=False,
                outputs=outputs,
            )

        self.in_proj = linear(_large_parts(delta, group))
        self.gates = linear(_small_parts(delta, group))

        def parts_of(
            part: str, shape: tuple[int, ...], spans: list[Span], dtype: torch.dtype | None
        ) -> Tensor:
            names = [f"{name}.{part}"] * len(spans)
            slices = [Slice(0, *span) for span in spans]
            return weights.stacked(names, [shape] * len(spans), dtype, slices)

        heads = [equal_span(delta.num_value_heads, group)]
        taps = parts_of("conv1d.weight", (state.conv_size, 1, state.conv_taps), _channels(delta, group), None)
        vector = (delta.num_value_heads,)
        self.weights = DeltaWeights(
            taps.squeeze(1).t().contiguous(),
            -parts_of("A_log", vector, heads, torch.float32).exp(),
            parts_of("dt_bias", vector, heads, torch.float32),
            weights.tensor(f"{name}.norm.weight", (delta.value_dim,), torch.float32),
            spec.rms_norm_eps,
            delta.num_key_heads // group.size,
        )
        self.out_proj = RowLinear(context, f"{name}.out_proj", delta.value_size, spec.hidden_size, bias=False)

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch, select_rows: SelectRows
    ) -> Tensor:
        """[T, hidden] -> [W, hidden]: all tokens move the states, only the kept rows are projected."""
        states = batch.states
        assert states is not None, "the batch of a model with state layers has states"
        adapters = None if batch.adapters is None else batch.adapters.tokens
        qkvz, ba = self.in_proj(x, adapters), self.gates(x, adapters)
        mixed = self.gated_delta(qkvz, ba, self.weights, states.pool.layer(self.layer_id), states.runs)
        return self.out_proj(select_rows(mixed), kept_adapters(batch, select_rows))


def _channels(delta: DeltaSpec, group: TPGroup) -> list[Span]:
    """This rank's channels of the convolution: of its queries, its keys and its values."""
    keys, values = equal_span(delta.num_key_heads, group), equal_span(delta.num_value_heads, group)
    return [
        keys.times(delta.key_dim),
        keys.times(delta.key_dim, delta.key_size),
        values.times(delta.value_dim, 2 * delta.key_size),
    ]


def _large_parts(delta: DeltaSpec, group: TPGroup) -> _Parts:
    """q, k, v and z of this rank's heads, each of all heads in order."""
    total = delta.conv_size + delta.value_size
    if not delta.fused_large:
        for span in _channels(delta, group):
            yield "in_proj_qkv", delta.conv_size, span
        values = equal_span(delta.num_value_heads, group)
        yield "in_proj_z", delta.value_size, values.times(delta.value_dim)
        return
    value = delta.values_per_key * delta.value_dim
    for size, offset in (
        (delta.key_dim, 0),
        (delta.key_dim, delta.key_dim),
        (value, 2 * delta.key_dim),
        (value, 2 * delta.key_dim + value),
    ):
        for span in _of_each_key_head(delta, group, 2 * delta.key_dim + 2 * value, size, offset):
            yield "in_proj_qkvz", total, span


def _small_parts(delta: DeltaSpec, group: TPGroup) -> _Parts:
    """b and a of this rank's heads."""
    num_heads, shared = delta.num_value_heads, delta.values_per_key
    if not delta.fused_small:
        for name in ("in_proj_b", "in_proj_a"):
            yield name, num_heads, equal_span(num_heads, group)
        return
    for offset in (0, shared):
        for span in _of_each_key_head(delta, group, 2 * shared, shared, offset):
            yield "in_proj_ba", 2 * num_heads, span


def _of_each_key_head(delta: DeltaSpec, group: TPGroup, rows: int, size: int, offset: int) -> Iterator[Span]:
    """The same part of each of this rank's key heads, in a matrix with `rows` for each of them."""
    for key_head in range(*equal_span(delta.num_key_heads, group)):
        start = key_head * rows + offset
        yield Span(start, start + size)
