"""8-bit floats: `Fp8Parts` reads an FP8 checkpoint, `MadeFp8Parts` quantizes a plain one while loading.

`<name>.weight` is [out, in] e4m3. Its scales are `<name>.weight_scale`, or `<name>.weight_scale_inv` in exports of
transformers, which name it by the inverse of the factor used in quantization. There is one scale per tensor, one per
output, or one per block of outputs and inputs. All are expanded to one per output, and per group of inputs if there are
blocks. This costs 3 % more memory than 128 x 128 blocks, and weights can be stacked and cut at any output. In MXFP8 the
scale of 32 inputs of an output is a byte (e8m0): the exponent of a power of two, plus 127.
"""

# Shapes: [N, K] a whole weight: N outputs, K inputs; G groups of inputs.

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from ...runtime.errors import ConfigError
from ..kernels.quantized_weights import FP8, Fp8Weight, quantize_to_fp8
from .reader import ModuleWeight, WeightReader, read_plain

if TYPE_CHECKING:
    from ...models.spec.quantization import QuantizationSpec
    from ..kernels.quantized import Part

_SCALES: Final = ("weight_scale_inv", "weight_scale")
_MX_BLOCK: Final = (1, 32)
"""The block of MXFP8."""


class Fp8Parts:
    """`PartReader` of an FP8 checkpoint."""

    def __init__(self, quantization: QuantizationSpec) -> None:
        self._quantization = quantization

    def read(self, module: ModuleWeight) -> Part:
        weights, name, shape, part = module
        scale_names = (f"{name}.{suffix}" for suffix in _SCALES)
        scale_name = next((one for one in scale_names if weights.shape(one, shape) is not None), None)
        if scale_name is None or self._quantization.is_plain(name):
            return read_plain([module])
        numbers = weights.stacked([f"{name}.weight"], [shape], FP8, slices=None if part is None else [part])
        scales, group_size = self._scales(weights, scale_name, shape)
        if part is not None and part.axis == 0:
            scales = scales[part.start : part.stop]
        elif part is not None and group_size < shape[1]:
            if part.start % group_size or (part.stop % group_size and part.stop != shape[1]):
                raise ConfigError(
                    f"{name}: a rank takes inputs {part.start} to {part.stop - 1}, but {group_size} neighbors share a "
                    "scale and cannot be split; use a smaller --tp"
                )
            scales = scales[:, part.start // group_size : -(-part.stop // group_size)]
        # Where all inputs share a scale, the group is as long as this rank's part.
        group_size = min(group_size, numbers.shape[1])
        return Fp8Weight(
            numbers,
            scales.contiguous(),
            group_size,
            self._quantization.activation_bound,
            self._quantization.weights_only,
        )

    def _scales(self, weights: WeightReader, name: str, shape: tuple[int, int]) -> tuple[Tensor, int]:
        """Scales, [N, G] float32, and the number of inputs that share one."""
        rows, columns = shape
        block = self._quantization.block
        if block is not None:
            blocks = (-(-rows // block[0]), -(-columns // block[1]))
            if block == _MX_BLOCK:
                return powers_of_two(weights.tensor(name, blocks, torch.uint8)), block[1]
            apart = (blocks[0], 1, blocks[1], 1)  # ModelOpt's FP8_PB_WO
            stored = apart if weights.shape(name, blocks) == apart else blocks
            scales = weights.tensor(name, stored, torch.float32).view(blocks)
            return scales.repeat_interleave(block[0], dim=0)[:rows], block[1]
        found = weights.shape(name, (rows, 1))
        if found in ((), (1,), (1, 1)):
            assert found is not None
            return weights.tensor(name, found, torch.float32).reshape(1, 1).expand(rows, 1), columns
        per_output = (rows,) if found == (rows,) else (rows, 1)
        return weights.tensor(name, per_output, torch.float32).view(rows, 1), columns


class MadeFp8Parts:
    """`PartReader` that quantizes plain weights to FP8: the scale of an output is set by its largest magnitude."""

    def __init__(self, quantization: QuantizationSpec) -> None:
        self._quantization = quantization

    def read(self, module: ModuleWeight) -> Part:
        """A rank with a part of the inputs takes the largest magnitude of its part."""
        plain = read_plain([module])
        return plain if self._quantization.is_plain(module.name) else quantize_to_fp8(plain)


def powers_of_two(codes: Tensor) -> Tensor:
    """The values of e8m0, uint8, in float32; the code of NaN becomes infinity."""
    return (codes.to(torch.int32) << 23).clamp_(min=1 << 22).view(torch.float32)  # as exponents of float32
