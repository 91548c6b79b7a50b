"""`QuantizedFormat`: linear layers of a quantized checkpoint, or of a plain one that is quantized while loading.

A `PartReader` (`fp8_format`, `awq_format`, `gptq_format`) reads the tensors of one module. `QuantizedLinears` packs
them for this device. Modules that are plain in the checkpoint stay plain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..kernels.quantized import Part, QuantizedLinears, dequantized
from .reader import Slice, WeightReader

if TYPE_CHECKING:
    from ..ops.linear import LinearWeight, LinearWithRows


class PartReader(Protocol):
    """Reads the weight of one module, or a rank's part of it."""

    def read(self, weights: WeightReader, name: str, shape: tuple[int, int], part: Slice | None) -> Part:
        """A tensor in the serving dtype if this module is plain in the checkpoint.

        Raises:
            ConfigError: a tensor is missing or has another shape or meaning, or cannot be cut there.
        """
        ...


class QuantizedFormat:
    """The `LinearFormat` of quantized models."""

    def __init__(self, parts: PartReader, linears: QuantizedLinears) -> None:
        self._parts = parts
        self._linears = linears

    def load(
        self,
        weights: WeightReader,
        names: Sequence[str],
        shapes: Sequence[tuple[int, int]],
        slices: Sequence[Slice] | None,
    ) -> LinearWeight:
        return self._linears.pack(self._read(weights, names, shapes, slices))

    def dense(
        self,
        weights: WeightReader,
        names: Sequence[str],
        shapes: Sequence[tuple[int, int]],
        slices: Sequence[Slice] | None,
    ) -> Tensor:
        return torch.cat(
            [dequantized(part, weights.dtype) for part in self._read(weights, names, shapes, slices)]
        )

    def head(
        self,
        weights: WeightReader,
        name: str,
        shape: tuple[int, int],
        rows: range,
        plain_rows: Callable[[], Tensor],
    ) -> LinearWeight:
        """The head is plain in every checkpoint."""
        return self._linears.pack([plain_rows()])

    def table(
        self, weights: WeightReader, name: str, shape: tuple[int, int], rows: range
    ) -> LinearWithRows | None:
        """Tables are plain in every checkpoint."""
        return None

    def _read(
        self,
        weights: WeightReader,
        names: Sequence[str],
        shapes: Sequence[tuple[int, int]],
        slices: Sequence[Slice] | None,
    ) -> list[Part]:
        parts: Sequence[Slice | None] = slices or [None] * len(names)
        return [
            self._parts.read(weights, name, shape, part)
            for name, shape, part in zip(names, shapes, parts, strict=True)
        ]
