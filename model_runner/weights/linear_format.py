"""`LinearFormat`: how a checkpoint stores the weights of linear layers, and how the device holds them.

There is one object for the whole model, chosen by the checkpoint and the user's settings. `Linear` takes its weight
from it and does not depend on whether that is bfloat16, 8-bit or 4-bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from ..ops.linear import LinearWeight, LinearWithRows, PackLinear
from .reader import Slice, WeightReader


class LinearFormat(Protocol):
    """Reads the weights of linear layers."""

    def load(
        self,
        weights: WeightReader,
        names: Sequence[str],
        shapes: Sequence[tuple[int, int]],
        slices: Sequence[Slice] | None,
    ) -> LinearWeight:
        """Load one layer's weight.

        Args:
            names: module names; the outputs of the modules are stacked. The format knows the tensors of a module.
            shapes: [out, in] of each whole weight.
            slices: the part of each weight to take, in terms of `shapes`; all with the same axis. None: all of it.

        Raises:
            ConfigError: a tensor is missing or has another shape, or cannot be cut there.
        """
        ...

    def dense(
        self,
        weights: WeightReader,
        names: Sequence[str],
        shapes: Sequence[tuple[int, int]],
        slices: Sequence[Slice] | None,
    ) -> Tensor:
        """The same in the serving dtype, [sum of outputs, inputs]: for kernels that take only this dtype."""
        ...

    def head(
        self,
        weights: WeightReader,
        name: str,
        shape: tuple[int, int],
        rows: range,
        plain_rows: Callable[[], Tensor],
    ) -> LinearWeight:
        """Load the output head's weight, which may be the embedding's as well.

        Args:
            name: name of its module.
            shape: shape of the whole weight.
            rows: the rows that this rank takes; rows beyond the end are zeros.
            plain_rows: reads these rows in the serving dtype, [rows, inputs].
        """
        ...

    def table(
        self, weights: WeightReader, name: str, shape: tuple[int, int], rows: range
    ) -> LinearWithRows | None:
        """Load a table that is no output head, if it has a form in which its rows can be looked up; see `head`.

        None: it is read in the serving dtype.
        """
        ...


class PlainFormat:
    """`<name>.weight` in a floating-point dtype, converted to the serving dtype."""

    def __init__(self, pack: PackLinear) -> None:
        self._pack = pack

    def load(
        self,
        weights: WeightReader,
        names: Sequence[str],
        shapes: Sequence[tuple[int, int]],
        slices: Sequence[Slice] | None,
    ) -> LinearWeight:
        return self._pack(self.dense(weights, names, shapes, slices))

    def dense(
        self,
        weights: WeightReader,
        names: Sequence[str],
        shapes: Sequence[tuple[int, int]],
        slices: Sequence[Slice] | None,
    ) -> Tensor:
        return weights.stacked([f"{name}.weight" for name in names], shapes, slices=slices)

    def head(
        self,
        weights: WeightReader,
        name: str,
        shape: tuple[int, int],
        rows: range,
        plain_rows: Callable[[], Tensor],
    ) -> LinearWeight:
        return self._pack(plain_rows())

    def table(
        self, weights: WeightReader, name: str, shape: tuple[int, int], rows: range
    ) -> LinearWithRows | None:
        return None
