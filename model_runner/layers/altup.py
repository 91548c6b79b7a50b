"""Layers with several residual streams, of which one is computed and the others are predicted (AltUp), and with a
learned residual beside attention (LAuReL), as in Gemma 3n (Baykal et al. 2023; Menghani et al. 2024).
"""

# Shapes: T new tokens in the batch, W of them kept, S streams, K hidden size.

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING

import torch

from ..kernels.streams import gelu_above
from ..ops.altup import AltUpWeights
from .layer import kept_adapters
from .linear import Linear
from .norm import RMSNorm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ..adapter_runs import AdapterRuns
    from ..distributed.tp_group import TPGroup
    from ..forward_batch import ForwardBatch
    from ..model_context import ModelContext
    from ..ops.elementwise import GatedActivation
    from .layer import MLP, Attention, SelectRows
    from .norm import Norm

_HALF: float = 0.5**0.5


class AltUpStreams:
    """The streams before the first layer and after the last one."""

    def __init__(self, context: ModelContext) -> None:
        """Take the projections from the checkpoint."""
        altup, size = context.spec.streams.altup, context.spec.hidden_size
        assert altup is not None
        others = range(altup.num_streams - 1)
        names = [f"model.altup_projections.{n}" for n in others]
        self._project = Linear(context, names, size, [size] * len(names), bias=False)
        self._unembed = [
            Linear(context, [f"model.altup_unembed_projections.{n}"], size, [size], bias=False)
            for n in others
        ]
        self._ops, self._scale = context.ops.altup, context.ops.scale

    def begin(self, embedded: Tensor, adapters: AdapterRuns | None) -> Tensor:
        """[T, K] -> [T, S, K]."""
        return self._ops.stack(embedded, self._project(embedded, adapters))

    def end(self, streams: Tensor, adapters: AdapterRuns | None) -> Tensor:
        """[W, S, K] -> [W, K]: the mean."""
        total: Tensor | None = None
        for n, unembed in enumerate(self._unembed):
            stream = streams[:, n + 1]
            # Kernels for quantized weights read whole rows; those of the CPU take rows apart.
            if stream.is_cuda:
                stream = stream.contiguous()
            total = self._ops.add_matched(streams, unembed(stream, adapters), total)
        assert total is not None, "there are at least two streams"
        return self._scale(total, 1.0 / streams.shape[1])


class AltUpLayer:
    """A layer of Gemma 3n: `StreamLayer`."""

    def __init__(
        self,
        context: ModelContext,
        name: str,
        norms: Sequence[Norm],
        attention: Attention,
        mlp: MLP,
        gate: Callable[[Tensor, Tensor, AdapterRuns | None], Tensor],
    ) -> None:
        """Take what is beside attention and MLP from the checkpoint.

        Args:
            name: of the layer.
            norms: before and after attention, before and after the MLP.
            gate: `InputGate` of the layer.
        """
        self.norms = norms
        self.attention = attention
        self.mlp = mlp
        self.gate = gate
        self.laurel = _Laurel(context, f"{name}.laurel")
        self.weights = _altup_weights(context, f"{name}.altup")
        self._ops, self._add, self._scale = context.ops.altup, context.ops.add, context.ops.scale

    def __call__(
        self,
        streams: Tensor,
        inputs: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        select_rows: SelectRows,
    ) -> Tensor:
        """[T, S, K] -> [W, S, K]."""
        assert inputs is not None
        before_attention, after_attention, before_mlp, after_mlp = self.norms
        predictions, active = self._ops.predict(streams, self.weights)
        x = before_attention(active)
        attended = after_attention(self.attention(x, cos, sin, batch, select_rows))
        # Of the other tokens nothing is read from here on.
        adapters = kept_adapters(batch, select_rows)
        predictions = select_rows(predictions.flatten(1)).view(-1, *predictions.shape[1:])
        x, active = select_rows(x), select_rows(active)
        learned = self._add(self.laurel(x, adapters), x)
        both = self._scale(self._add(learned, self._add(active, attended)), _HALF)
        activated = self._add(after_mlp(self.mlp(before_mlp(both), adapters)), both)
        corrected, scaled = self._ops.correct(predictions, activated, self.weights)
        return self._ops.spread(self.gate(scaled, select_rows(inputs), adapters), corrected)


class _Laurel:
    """norm(right(left(x)))."""

    def __init__(self, context: ModelContext, name: str) -> None:
        spec = context.spec
        altup, size = spec.streams.altup, spec.hidden_size
        assert altup is not None
        rank = altup.laurel_rank
        self._left = Linear(context, [f"{name}.linear_left"], size, [rank], bias=False)
        self._right = Linear(context, [f"{name}.linear_right"], rank, [size], bias=False)
        self._norm = RMSNorm(context, f"{name}.post_laurel_norm", size, spec.rms_norm_eps)

    def __call__(self, x: Tensor, adapters: AdapterRuns | None) -> Tensor:
        """[W, K] -> [W, K]."""
        return self._norm(self._right(self._left(x, adapters), adapters))


def _altup_weights(context: ModelContext, name: str) -> AltUpWeights:
    """In float32: they are few numbers."""
    spec = context.spec
    altup, size = spec.streams.altup, spec.hidden_size
    assert altup is not None
    streams = altup.num_streams

    def read(part: str, *shape: int) -> Tensor:
        return context.weights.tensor(f"{name}.{part}", shape, torch.float32)

    output_scale = read("correct_output_scale", size)
    return AltUpWeights(
        # The normalized stream is divided by its size before the router.
        router=read("modality_router.weight", streams, size) * read("router_norm.weight", size) / size,
        predictions=read("prediction_coefs.weight", streams * streams, streams),
        corrections=read("correction_coefs.weight", streams, streams),
        output_scale=output_scale if altup.scales_output else torch.ones_like(output_scale),
        active=altup.active,
        eps=spec.rms_norm_eps,
    )


def gated_activation(context: ModelContext, layer_id: int) -> GatedActivation:
    """The activation of a layer's MLP.

    Of all gates, or of the largest ones: those above a quantile of the normal distribution with the gates' mean and
    deviation (`StreamsSpec.sparsity`).
    """
    spec, ops = context.spec, context.ops
    sparsity = spec.streams.sparsity[layer_id] if spec.streams.sparsity else 0.0
    if sparsity == 0.0:
        return ops.gelu_and_mul
    multiplier = NormalDist().inv_cdf(sparsity)
    if context.group.size > 1:
        return _SparseOverRanks(context.group, spec.inner_size_of(layer_id), multiplier)
    return lambda gate_up: ops.sparse_gelu_and_mul(gate_up, multiplier)


class _SparseOverRanks:
    """The same where each rank has a part of the gates: they add up their sums, then their sums of squares."""

    def __init__(self, group: TPGroup, num_gates: int, multiplier: float) -> None:
        self._all_reduce = group.all_reduce
        self._num_gates, self._multiplier = num_gates, multiplier

    def __call__(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
        mean = self._all_reduce(gate.sum(dim=-1, keepdim=True)) / self._num_gates
        squares = self._all_reduce((gate - mean).square().sum(dim=-1, keepdim=True)) / self._num_gates
        return gelu_above(gate, mean + self._multiplier * squares.sqrt(), up).to(gate_up.dtype)
