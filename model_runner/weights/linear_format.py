"""`LinearFormat`: how a checkpoint stores the weights of linear layers, and how the device holds them.

There is one object for the whole model, chosen by the checkpoint and the user's settings. `Linear` takes its weight
from it and does not depend on whether that is bfloat16, 8-bit or 4-bit.

`PlainFormat` and `QuantizedFormat` are here, `block_format` has a third. A `PartReader` (`fp8_format`, `int4_format`)
reads the tensors of one quantized module, and `QuantizedLinears` packs them for this device. Modules that are plain in
the checkpoint stay plain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..kernels.quantized import Part, QuantizedLinears, dequantized
from .reader import ModuleWeight, read_plain

if TYPE_CHECKING:
    from ..ops.linear import LinearWeight, LinearWithRows, PackLinear


class LinearFormat(Protocol):
    """Reads the weights of linear layers."""

    def load(self, modules: Sequence[ModuleWeight]) -> LinearWeight:
        """Load one layer's weight; the outputs of several modules are stacked, and all are cut along the same axis.

        Raises:
            ConfigError: a tensor is missing or has another shape, or cannot be cut there.
        """
        ...

    def dense(self, modules: Sequence[ModuleWeight]) -> Tensor:
        """The same in the serving dtype, [sum of outputs, inputs]: for kernels that take only this dtype."""
        ...

    def head(self, module: ModuleWeight, rows: range, plain_rows: Callable[[], Tensor]) -> LinearWeight:
        """Load the output head's weight, which may be the embedding's as well.

        Args:
            module: the whole weight.
            rows: the rows that this rank takes; rows beyond the end are zeros.
            plain_rows: reads these rows in the serving dtype, [rows, inputs].
        """
        ...

    def table(self, module: ModuleWeight, rows: range) -> LinearWithRows | None:
        """Load a table that is no output head, if it has a form in which its rows can be looked up; see `head`.

        None: it is read in the serving dtype.
        """
        ...


class PlainFormat:
    """`<name>.weight` in a floating-point dtype, converted to the serving dtype."""

    def __init__(self, pack: PackLinear) -> None:
        self._pack = pack

    def load(self, modules: Sequence[ModuleWeight]) -> LinearWeight:
        return self._pack(read_plain(modules))

    def dense(self, modules: Sequence[ModuleWeight]) -> Tensor:
        return read_plain(modules)

    def head(self, module: ModuleWeight, rows: range, plain_rows: Callable[[], Tensor]) -> LinearWeight:
        return self._pack(plain_rows())

    def table(self, module: ModuleWeight, rows: range) -> LinearWithRows | None:
        return None


class PartReader(Protocol):
    """Reads the weight of one quantized module."""

    def read(self, module: ModuleWeight) -> Part:
        """A tensor in the serving dtype if this module is plain in the checkpoint.

        Raises:
            ConfigError: a tensor is missing or has another shape or meaning, or cannot be cut there.
        """
        ...


class QuantizedFormat:
    """The `LinearFormat` of a quantized checkpoint, or of a plain one that is quantized while loading."""

    def __init__(self, parts: PartReader, linears: QuantizedLinears) -> None:
        self._parts = parts
        self._linears = linears

    def load(self, modules: Sequence[ModuleWeight]) -> LinearWeight:
        return self._linears.pack([self._parts.read(one) for one in modules])

    def dense(self, modules: Sequence[ModuleWeight]) -> Tensor:
        return torch.cat([dequantized(self._parts.read(one), one.reader.dtype) for one in modules])

    def head(self, module: ModuleWeight, rows: range, plain_rows: Callable[[], Tensor]) -> LinearWeight:
        """The head is plain in every checkpoint."""
        return self._linears.pack([plain_rows()])

    def table(self, module: ModuleWeight, rows: range) -> LinearWithRows | None:
        """Tables are plain in every checkpoint."""
        return None
