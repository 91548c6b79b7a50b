"""Linear layers, also merged: one matmul for two or three projections of the architecture.

With several ranks the first matrix of a block is cut by outputs (`Linear` with spans): each rank has some of the heads,
or a part of the MLP's width. The second is cut by inputs (`RowLinear`) and is followed by an all-reduce: one per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ..weights.reader import ModuleWeight, Slice
from .spans import Span, equal_span

if TYPE_CHECKING:
    from ..adapter_runs import AdapterRuns
    from ..model_context import ModelContext
    from ..ops.deltas import LowRankDelta


class Linear:
    """y = x @ W.T (+ b), where W may be several named weights stacked by their outputs."""

    def __init__(
        self,
        context: ModelContext,
        names: list[str],
        in_features: int,
        out_features: list[int],
        *,
        bias: bool,
        outputs: Sequence[Span] | None = None,
    ) -> None:
        """Take the weights from a checkpoint.

        Args:
            names: module names; `<name>.weight` is [out, in], `<name>.bias` is [out].
            out_features: number of outputs of each whole weight.
            outputs: the outputs of each weight to take; a name may occur several times, for several parts. None: all.
        """
        weights = context.weights
        slices = None if outputs is None else [Slice(0, *span) for span in outputs]
        modules = [
            ModuleWeight(weights, name, (rows, in_features))
            for name, rows in zip(names, out_features, strict=True)
        ]
        if slices is not None:
            modules = [one._replace(part=part) for one, part in zip(modules, slices, strict=True)]
        self.weight = context.linear_format.load(modules)
        self.bias: Tensor | None = None
        if bias:
            self.bias = weights.stacked(
                [f"{name}.bias" for name in names], [(rows,) for rows in out_features], slices=slices
            )
        self.delta: LowRankDelta | None = None
        if context.adapters is not None:
            self.delta = context.adapters.linear(
                context.ops.deltas, names, in_features, out_features, rows=outputs
            )

    def __call__(self, x: Tensor, adapters: AdapterRuns | None = None) -> Tensor:
        """[T, in] -> [T, sum of outputs]; `adapters`: of the T tokens, None: all use the base model."""
        y = self.weight(x, self.bias)
        return y if adapters is None or self.delta is None else self.delta.add(x, y, adapters)


class RowLinear:
    """y = x @ W.T (+ b), where each rank has a part of x and every rank gets the whole y."""

    def __init__(
        self,
        context: ModelContext,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        is_summed: bool = True,
    ) -> None:
        """Take this rank's part of the weight from a checkpoint.

        Args:
            in_features: number of inputs of the whole weight.
            is_summed: if False, each rank gets its part of the sum, and the caller sums.
        """
        weights, group = context.weights, context.group
        part = None if group.size == 1 else Slice(1, *equal_span(in_features, group))
        self.weight = context.linear_format.load(
            [ModuleWeight(weights, name, (out_features, in_features), part)]
        )
        self.bias: Tensor | None = None
        if bias and group.rank == 0:  # only one rank adds the bias to the sum
            self.bias = weights.tensor(f"{name}.bias", (out_features,))
        elif bias:
            weights.ignore(f"{name}.bias")
        self._all_reduce = group.all_reduce if is_summed else _part
        self.delta: LowRankDelta | None = None
        if context.adapters is not None:
            columns = None if group.size == 1 else equal_span(in_features, group)
            self.delta = context.adapters.linear(
                context.ops.deltas, [name], in_features, [out_features], columns=columns
            )

    def __call__(self, x: Tensor, adapters: AdapterRuns | None = None) -> Tensor:
        """[T, in / ranks] -> [T, out]; `adapters`: see `Linear`. Each rank adds its part of the change."""
        y = self.weight(x, self.bias)
        if adapters is not None and self.delta is not None:
            y = self.delta.add(x, y, adapters)
        return self._all_reduce(y)


def _part(y: Tensor) -> Tensor:
    """Stands for the all-reduce of a layer whose caller makes it."""
    return y
