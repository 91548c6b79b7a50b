"""`Fp4Parts`: 4-bit floats of compressed-tensors and ModelOpt exports, NVFP4 and MXFP4.

The tensors of a module:

    <name>.weight_packed, or <name>.weight   uint8 [N, K/2]    e2m1 of two neighboring inputs, the first in the low half
    <name>.weight_scale                      e4m3 [N, K/16]    NVFP4, of 16 neighboring inputs (or of a multiple)
                                             uint8 [N, K/32]   MXFP4: e8m0, the exponent of a power of two, plus 127
    <name>.weight_scale_2                    float32 () or [1] NVFP4 of ModelOpt: a factor of all scales
    <name>.weight_global_scale               float32 [1]       NVFP4 of compressed-tensors: all scales are divided by it
"""

# Shapes: [N, K] a whole weight: N outputs, K inputs.

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from ...models.spec.quantization import MXFP4
from ...runtime.errors import ConfigError
from ..kernels.quantized_weights import BLOCK_SIZE, HALF_BLOCK, BlockWeight
from .fp8_format import powers_of_two
from .reader import ModuleWeight, Slice, read_plain

if TYPE_CHECKING:
    from ...models.spec.quantization import QuantizationSpec
    from ..kernels.quantized import Part

_WEIGHTS: Final = ("weight_packed", "weight")
_HALF: Final = 0.5
"""The values of `MXFP4.table` are twice the floats."""


class Fp4Parts:
    """`PartReader` of NVFP4 and MXFP4."""

    def __init__(self, quantization: QuantizationSpec) -> None:
        self._quantization = quantization
        self._is_nvfp4 = quantization.method == "nvfp4"
        self._scale_len = HALF_BLOCK if self._is_nvfp4 else BLOCK_SIZE

    def read(self, module: ModuleWeight) -> Part:
        weights, name, (rows, columns), part = module
        scale_name, packed_shape = f"{name}.weight_scale", (rows, columns // 2)
        stored = weights.shape(scale_name, (rows, columns // self._scale_len))
        if self._quantization.is_plain(name) or stored is None:
            return read_plain([module])
        if len(stored) != 2 or stored[0] != rows or not stored[1] or columns % (stored[1] * self._scale_len):
            raise ConfigError(
                f"{weights.describe(scale_name)}: tensor {scale_name!r} has the shape {list(stored)}, but scales of "
                f"{self._scale_len} inputs or a multiple are expected for a weight of {rows} outputs and {columns} "
                "inputs; config.json does not fit it"
            )
        size = columns // stored[1]
        step = max(size, BLOCK_SIZE)
        if part is not None and part.axis == 1 and (part.start % step or part.stop % step):
            raise ConfigError(
                f"{name}: a rank takes inputs {part.start} to {part.stop - 1}, but {step} neighbors share a scale and "
                "cannot be split; use a smaller --tp"
            )
        packed = next(one for one in _WEIGHTS if weights.shape(f"{name}.{one}", packed_shape) is not None)
        pairs = weights.stacked([f"{name}.{packed}"], [packed_shape], torch.uint8, _per(part, 2))
        dtype = torch.float8_e4m3fn if self._is_nvfp4 else torch.uint8
        codes = weights.stacked([scale_name], [stored], dtype, _per(part, size))
        scales = codes.to(torch.float32) if self._is_nvfp4 else powers_of_two(codes).mul_(_HALF)
        factor = self._factor(module) * _HALF if self._is_nvfp4 else None
        scales = scales.repeat_interleave(size // self._scale_len, dim=1)
        numbers = torch.stack([pairs & 15, pairs >> 4], dim=2).flatten(1)
        return BlockWeight(numbers, scales, None, MXFP4.zero, 4, MXFP4.table, factor)

    def _factor(self, module: ModuleWeight) -> float:
        """The factor of all scales; float32 holds it."""
        weights, name = module.reader, module.name
        for tensor, is_inverse in ((f"{name}.weight_scale_2", False), (f"{name}.weight_global_scale", True)):
            found = weights.shape(tensor, (1,))
            if found in ((), (1,)):
                value = weights.tensor(tensor, found, torch.float32).reshape(1)
                return float(1 / value if is_inverse else value)
        raise ConfigError(
            f"{weights.describe(name)}: tensor '{name}.weight_scale_2' or '{name}.weight_global_scale', one number, is "
            "missing; download the model again, or check that config.json belongs to it"
        )


def _per(part: Slice | None, inputs: int) -> list[Slice] | None:
    """The slice of a tensor with one value for so many inputs."""
    if part is None:
        return None
    return [part if part.axis == 0 else Slice(1, part.start // inputs, part.stop // inputs)]
