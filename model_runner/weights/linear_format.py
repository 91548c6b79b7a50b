"""`LinearFormat`: how a checkpoint stores the weights of linear layers, and how the device holds them.

There is one object for the whole model, chosen by the checkpoint and the user's settings. `Linear` takes its weight
from it and does not depend on whether that is bfloat16, 8-bit or 4-bit.

`PlainFormat` and `QuantizedFormat` are here, `block_format` has a third. A `PartReader` (`fp8_format`, `fp4_format`,
`int_format`) reads the tensors of one quantized module, and `QuantizedLinears` packs them for this device. Modules that
are plain in the checkpoint stay plain.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ...runtime.errors import ConfigError
from ..kernels.quantized import Part, QuantizedLinears, dequantized
from ..kernels.quantized_weights import BlockWeight, Fp8Weight, IntWeight
from .reader import ModuleWeight, Slice, read_plain

if TYPE_CHECKING:
    from ...models.spec.quantization import QuantizationSpec
    from ..ops.linear import LinearWeight, LinearWithRows, PackLinear


logger = logging.getLogger(__name__)


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


class MixedParts:
    """`PartReader` of a checkpoint with several forms, by module."""

    def __init__(
        self, quantization: QuantizationSpec, make_reader: Callable[[QuantizationSpec], PartReader]
    ) -> None:
        self._quantization = quantization
        self._readers = {id(form): make_reader(form) for _, form in quantization.parts}

    def read(self, module: ModuleWeight) -> Part:
        form = self._quantization.part_of(module.name)
        return read_plain([module]) if form is None else self._readers[id(form)].read(module)


class FiniteScales:
    """`PartReader` of any quantized form that refuses scales, minima and factors which are not finite."""

    def __init__(self, parts: PartReader) -> None:
        self._parts = parts

    def read(self, module: ModuleWeight) -> Part:
        part = self._parts.read(module)
        if not isinstance(part, Fp8Weight | IntWeight | BlockWeight):
            return part
        is_finite = bool(part.scales.isfinite().all())
        if isinstance(part, BlockWeight):
            is_finite &= part.minima is None or bool(part.minima.isfinite().all())
            is_finite &= part.factor is None or math.isfinite(part.factor)
        if not is_finite:
            raise ConfigError(
                f"{module.name}: holds scales that are not finite; the file is damaged: download the model again"
            )
        return part


class InputFactors:
    """`PartReader` of modules with factors of their inputs, which no kernel applies: these are dequantized."""

    def __init__(self, parts: PartReader) -> None:
        self._parts = parts
        self._has_warned = False

    def read(self, module: ModuleWeight) -> Part:
        weights, name, (_, columns), cut = module
        part = self._parts.read(module)
        tensor = f"{name}.pre_quant_scale"
        if weights.shape(tensor, (columns,)) is None:
            return part
        factors = weights.tensor(tensor, (columns,), torch.float32)
        if cut is not None and cut.axis == 1:
            factors = factors[cut.start : cut.stop]
        if (factors == 1).all():
            return part
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s and others have factors of their inputs (pre_quant_scale): they are dequantized", name
            )
        return dequantized(part, torch.float32).mul(factors).to(weights.dtype)


class QuantizedFormat:
    """The `LinearFormat` of a quantized checkpoint, or of a plain one that is quantized while loading."""

    def __init__(self, parts: PartReader, linears: QuantizedLinears, *, may_have_head: bool = False) -> None:
        """Take the parts; `may_have_head`: the output head may be quantized, too."""
        self._parts = parts
        self._linears = linears
        self._may_have_head = may_have_head

    def load(self, modules: Sequence[ModuleWeight]) -> LinearWeight:
        return self._linears.pack([self._parts.read(one) for one in modules])

    def dense(self, modules: Sequence[ModuleWeight]) -> Tensor:
        return torch.cat([dequantized(self._parts.read(one), one.reader.dtype) for one in modules])

    def head(self, module: ModuleWeight, rows: range, plain_rows: Callable[[], Tensor]) -> LinearWeight:
        """The head is plain in nearly every checkpoint; if it is not, it has scales as other modules."""
        stop = min(rows.stop, module.shape[0])
        if not self._may_have_head or rows.start >= stop:
            return self._linears.pack([plain_rows()])
        part = self._parts.read(module._replace(part=Slice(0, rows.start, stop)))
        if isinstance(part, BlockWeight):
            return self._linears.pack([part.padded(len(rows))])
        plain = dequantized(part, module.reader.dtype)
        return self._linears.pack([F.pad(plain, (0, 0, 0, rows.stop - stop))])

    def table(self, module: ModuleWeight, rows: range) -> LinearWithRows | None:
        """Tables are plain in every checkpoint."""
        return None
