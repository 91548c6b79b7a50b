"""`AwqParts`: weights in the layout of AWQ's gemm kernels (Lin et al. 2023; casper-hansen/AutoAWQ).

    <name>.qweight  int32 [K, N/8]   one word packs the 4-bit integers of eight neighboring outputs
    <name>.qzeros   int32 [K/group, N/8], the same packing
    <name>.scales   [K/group, N]

Nibble i of a word holds output (0, 2, 4, 6, 1, 3, 5, 7)[i] of its eight. A weight is (integer - zero) * scale.
"""

# Shapes: [N, K] a whole weight: N outputs, K inputs.

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from ..kernels.quantized_weights import Int4Weight
from .fp8_format import read_plain
from .int4_tensors import PER_WORD, Int4Cut, read_scales, unpack
from .reader import Slice, WeightReader

if TYPE_CHECKING:
    from ...models.spec.quantization import QuantizationSpec
    from ..kernels.quantized import Part

NIBBLE_OF_OUTPUT: Final = (0, 4, 1, 5, 2, 6, 3, 7)


class AwqParts:
    """See the module."""

    def __init__(self, quantization: QuantizationSpec) -> None:
        self._quantization = quantization

    def read(self, weights: WeightReader, name: str, shape: tuple[int, int], part: Slice | None) -> Part:
        if self._quantization.is_plain(name) or weights.shape(f"{name}.qweight", shape) is None:
            return read_plain(weights, name, shape, part)
        rows, columns = shape
        cut = Int4Cut(self._quantization, name, shape, part)
        words = weights.stacked(
            [f"{name}.qweight"], [(columns, rows // PER_WORD)], torch.int32, cut.numbers(PER_WORD, 1)
        )
        zeros = weights.stacked(
            [f"{name}.qzeros"], [(cut.num_groups, rows // PER_WORD)], torch.int32, cut.groups(PER_WORD)
        )
        scales = read_scales(weights, f"{name}.scales", (cut.num_groups, rows), cut.groups(1))
        numbers = unpack(words, 1, NIBBLE_OF_OUTPUT)
        return Int4Weight(
            numbers,
            scales,
            unpack(zeros, 1, NIBBLE_OF_OUTPUT),
            min(cut.group_size, numbers.shape[0]),
        )
