"""Linear layers and their merged forms: one matrix product where the architecture names two or three."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .. import ops

if TYPE_CHECKING:
    from ..weights.reader import WeightReader


class Linear:
    """y = x @ W.T (+ b), where W may be several named weights stacked by their outputs."""

    def __init__(
        self,
        weights: WeightReader,
        names: list[str],
        in_features: int,
        out_features: list[int],
        *,
        bias: bool,
    ) -> None:
        """Take the weights from a checkpoint.

        Args:
            names: module names; `<name>.weight` is [out, in], `<name>.bias` is [out].
            out_features: of each name.
        """
        shapes = [(rows, in_features) for rows in out_features]
        self.weight = ops.LinearWeight(weights.stacked([f"{name}.weight" for name in names], shapes))
        self.bias: Tensor | None = None
        if bias:
            self.bias = weights.stacked(
                [f"{name}.bias" for name in names], [(rows,) for rows in out_features]
            )

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, sum of out]."""
        return ops.linear(x, self.weight, self.bias)
