"""Mamba 2 (Dao and Gu 2024; Granite 4, Nemotron-H): a state layer in the place of attention."""

# Shapes: T new tokens in the batch, W of them kept; G groups of all ranks; others: see `MambaWeights`, of this rank.

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ..states.state_weights import MambaWeights
from ..weights.reader import Slice
from .layer import kept_adapters
from .linear import Linear, RowLinear
from .spans import Span, equal_span, kv_head_span

if TYPE_CHECKING:
    from torch import Tensor

    from ...models.spec.state_spec import Mamba2Spec
    from ..distributed.tp_group import TPGroup
    from ..forward_batch import ForwardBatch
    from ..model_context import ModelContext
    from .layer import SelectRows


class Mamba2:
    """out(norm(scan(conv(x, B, C), dt) * silu(z))); it has the form of `SelfAttention`.

    The heads are divided among ranks, and with them the groups; with fewer groups than ranks, several ranks have the
    B and C of the same group, and a norm over its heads is one over these ranks.
    """

    def __init__(self, context: ModelContext, name: str, layer_id: int) -> None:
        """Take the weights from a checkpoint."""
        spec, state, group, weights = context.spec, context.spec.state, context.group, context.weights
        assert state is not None and state.mamba is not None, "the model has layers of Mamba 2"
        mamba, bias = state.mamba, state.mamba.projection_bias
        self.layer_id = layer_id
        self.mamba2 = context.ops.mamba2
        outputs = None if group.size == 1 else _projected(mamba, group)
        num_parts = 1 if outputs is None else len(outputs)
        self.in_proj = Linear(
            context,
            [f"{name}.in_proj"] * num_parts,
            spec.hidden_size,
            [mamba.projected_size] * num_parts,
            bias=bias,
            outputs=outputs,
        )

        def parts_of(
            part: str, shape: tuple[int, ...], spans: list[Span], dtype: torch.dtype | None = None
        ) -> Tensor:
            slices = [Slice(0, *span) for span in spans]
            return weights.stacked([f"{name}.{part}"] * len(spans), [shape] * len(spans), dtype, slices)

        def of_heads(part: str, size: int = 1) -> Tensor:
            spans = [equal_span(mamba.num_heads, group).times(size)]
            return parts_of(part, (mamba.num_heads * size,), spans, torch.float32)

        channels = _channels(mamba, group)
        taps = parts_of("conv1d.weight", (state.conv_size, 1, state.conv_taps), channels)
        conv_bias = parts_of("conv1d.bias", (state.conv_size,), channels) if state.conv_bias else None
        norm = of_heads("norm.weight", mamba.head_dim)
        is_divided = mamba.num_groups % group.size != 0
        self._norm = _NormOverRanks(context, mamba, norm) if is_divided else None
        self.weights = MambaWeights(
            taps.squeeze(1).t().contiguous(),
            conv_bias,
            -of_heads("A_log").exp(),
            of_heads("dt_bias"),
            of_heads("D"),
            None if is_divided else norm,
            spec.rms_norm_eps,
            len(kv_head_span(mamba.num_groups, group)),
            mamba.least_step,
            math.inf if mamba.most_step is None else mamba.most_step,
        )
        self.out_proj = RowLinear(context, f"{name}.out_proj", mamba.inner_size, spec.hidden_size, bias=bias)

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch, select_rows: SelectRows
    ) -> Tensor:
        """[T, hidden] -> [W, hidden]: all tokens move the states, only the kept rows are projected."""
        states = batch.states
        assert states is not None, "the batch of a model with state layers has states"
        zxbcdt = self.in_proj(x, None if batch.adapters is None else batch.adapters.tokens)
        mixed = self.mamba2(zxbcdt, self.weights, states.pool.layer(self.layer_id), states.runs)
        if self._norm is not None:
            mixed = self._norm(mixed).to(x.dtype)
        return self.out_proj(select_rows(mixed), kept_adapters(batch, select_rows))


class _NormOverRanks:
    """The norm of groups whose heads are on several ranks, which add up their sums of squares."""

    def __init__(self, context: ModelContext, mamba: Mamba2Spec, weight: Tensor) -> None:
        """`weight`: of this rank's heads."""
        self._weight, self._eps = weight, context.spec.rms_norm_eps
        self._all_reduce = context.group.all_reduce
        self._num_groups, self._size = mamba.num_groups, mamba.inner_size // mamba.num_groups
        self._group = kv_head_span(mamba.num_groups, context.group).start

    def __call__(self, gated: Tensor) -> Tensor:
        """[T, H * P] float32, of one group -> the same."""
        squares = gated.new_zeros((len(gated), self._num_groups))
        squares[:, self._group] = gated.square().sum(dim=-1)
        means = self._all_reduce(squares)[:, self._group, None] / self._size
        return gated * (means + self._eps).rsqrt() * self._weight


def _projected(mamba: Mamba2Spec, group: TPGroup) -> list[Span]:
    """This rank's outputs of the first projection: z, the channels of the convolution, and the time steps."""
    heads, inner = equal_span(mamba.num_heads, group), mamba.inner_size
    channels = [span.times(1, inner) for span in _channels(mamba, group)]
    return [heads.times(mamba.head_dim), *channels, heads.times(1, inner + mamba.conv_size)]


def _channels(mamba: Mamba2Spec, group: TPGroup) -> list[Span]:
    """This rank's channels of the convolution: of x, B and C."""
    heads, groups = equal_span(mamba.num_heads, group), kv_head_span(mamba.num_groups, group)
    return [
        heads.times(mamba.head_dim),
        groups.times(mamba.state_dim, mamba.inner_size),
        groups.times(mamba.state_dim, mamba.inner_size + mamba.group_size),
    ]
