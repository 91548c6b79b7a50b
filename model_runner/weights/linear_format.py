"""`LinearFormat`: how a checkpoint stores the weights of linear layers, and what becomes of them on the device.

One object for the whole model, chosen by what the checkpoint and the user say; `Linear` asks it for its weight and
never learns whether that is bfloat16, 8-bit or 4-bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from ..ops import LinearWeight, PackLinear
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
        """One layer's weight.

        Args:
            names: of the modules whose outputs are stacked; which tensors stand below a name is the format's business.
            shapes: [out, in] of each whole weight.
            slices: what to take of each, in terms of these shapes; all with the same axis. None: all of it.

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
        """The same in the serving dtype, [sum of outputs, inputs]: for weights whose kernels know nothing else."""
        ...

    def head(
        self,
        weights: WeightReader,
        name: str,
        shape: tuple[int, int],
        rows: range,
        plain_rows: Callable[[], Tensor],
    ) -> LinearWeight:
        """The output head's weight, which may be that of the embedding as well.

        Args:
            name: of its module.
            shape: of the whole weight.
            rows: what this rank takes of it; those beyond its end are zeros.
            plain_rows: reads them in the serving dtype, [rows, inputs].
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
        """See `LinearFormat`."""
        return self._pack(self.dense(weights, names, shapes, slices))

    def dense(
        self,
        weights: WeightReader,
        names: Sequence[str],
        shapes: Sequence[tuple[int, int]],
        slices: Sequence[Slice] | None,
    ) -> Tensor:
        """See `LinearFormat`."""
        return weights.stacked([f"{name}.weight" for name in names], shapes, slices=slices)

    def head(
        self,
        weights: WeightReader,
        name: str,
        shape: tuple[int, int],
        rows: range,
        plain_rows: Callable[[], Tensor],
    ) -> LinearWeight:
        """See `LinearFormat`."""
        return self._pack(plain_rows())
