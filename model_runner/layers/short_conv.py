"""Gated short convolution (LFM2): a state layer in the place of attention."""

# Shapes: T new tokens in the batch, W of them kept, K channels (of this rank), L taps.

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..weights.reader import Slice
from .layer import kept_adapters
from .linear import Linear, RowLinear
from .spans import equal_span

if TYPE_CHECKING:
    from ..forward_batch import ForwardBatch
    from ..model_context import ModelContext
    from .layer import SelectRows


class ShortConv:
    """out(C * conv(B * x)), where B, C and x are one matmul; it has the form of `SelfAttention`."""

    def __init__(self, context: ModelContext, name: str, layer_id: int) -> None:
        """Take the weights from a checkpoint; several ranks share the channels."""
        spec, state, group, weights = context.spec, context.spec.state, context.group, context.weights
        assert state is not None, "the model has state layers"
        self.layer_id = layer_id
        self.short_conv = context.ops.short_conv
        size, bias = state.conv_size, state.conv_bias
        span = equal_span(size, group)
        shared = group.size > 1
        outputs = [span.times(1, part * size) for part in range(3)] if shared else None
        num_parts = 3 if shared else 1
        self.in_proj = Linear(
            context,
            [f"{name}.in_proj"] * num_parts,
            spec.hidden_size,
            [3 * size] * num_parts,
            bias=bias,
            outputs=outputs,
        )
        slices = [Slice(0, *span)] if shared else None
        taps = weights.stacked([f"{name}.conv.weight"], [(size, 1, state.conv_taps)], slices=slices)
        self.weight = taps.squeeze(1).t().contiguous()  # [L, K]
        self.bias: Tensor | None = None
        if bias:
            self.bias = weights.stacked([f"{name}.conv.bias"], [(size,)], slices=slices)
        self.out_proj = RowLinear(context, f"{name}.out_proj", size, spec.hidden_size, bias=bias)

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch, select_rows: SelectRows
    ) -> Tensor:
        """[T, hidden] -> [W, hidden]: all tokens move the states, only the kept rows are projected."""
        adapters, states = batch.adapters, batch.states
        assert states is not None, "the batch of a model with state layers has states"
        bcx = self.in_proj(x) if adapters is None else self.in_proj(x, adapters.tokens)
        mixed = self.short_conv(
            bcx, self.weight, self.bias, states.pool.layer(self.layer_id).conv, states.runs
        )
        return self.out_proj(select_rows(mixed), kept_adapters(batch, select_rows))
