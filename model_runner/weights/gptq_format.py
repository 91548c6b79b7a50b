"""`GptqParts`: weights in the layout of GPTQ exports (Frantar et al. 2022; AutoGPTQ, ModelCloud/GPTQModel).

    <name>.qweight  int32 [K/8, N]   4-bit integers of eight neighboring inputs, the first in the lowest bits
    <name>.qzeros   int32 [K/group, N/8], of eight neighboring outputs; format version 1 stores zero - 1
    <name>.scales   [K/group, N]
    <name>.g_idx    int32 [K]        the group of each input

A weight is (integer - zero) * scale. With `desc_act` inputs are quantized in the order of their importance, and the
inputs of a group are not adjacent. Rows are then sorted by group here, and activations are permuted before the matmul.
"""

# Shapes: [N, K] a whole weight: N outputs, K inputs.

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...runtime.errors import ConfigError
from ..kernels.quantized_weights import Int4Weight
from .fp8_format import read_plain
from .int4_tensors import PER_WORD, Int4Cut, read_scales, unpack
from .reader import Slice, WeightReader

if TYPE_CHECKING:
    from ...models.spec.quantization import QuantizationSpec
    from ..kernels.quantized import Part


class GptqParts:
    """See the module."""

    def __init__(self, quantization: QuantizationSpec) -> None:
        self._quantization = quantization

    def read(self, weights: WeightReader, name: str, shape: tuple[int, int], part: Slice | None) -> Part:
        if self._quantization.is_plain(name) or weights.shape(f"{name}.qweight", shape) is None:
            return read_plain(weights, name, shape, part)
        rows, columns = shape
        cut = Int4Cut(self._quantization, name, shape, part)
        order = self._order(weights, name, columns, cut.group_size, part)
        words = weights.stacked(
            [f"{name}.qweight"], [(columns // PER_WORD, rows)], torch.int32, cut.numbers(1, PER_WORD)
        )
        zeros = weights.stacked(
            [f"{name}.qzeros"], [(cut.num_groups, rows // PER_WORD)], torch.int32, cut.groups(PER_WORD)
        )
        scales = read_scales(weights, f"{name}.scales", (cut.num_groups, rows), cut.groups(1))
        _skip_bias_of_zeros(weights, f"{name}.bias", rows)
        numbers, whole_zeros = unpack(words, 0), unpack(zeros, 1)
        if self._quantization.zeros_less_one:
            whole_zeros = (whole_zeros + 1) & 15  # a stored 15 means 0: 16 does not occur
        if order is not None:
            numbers = numbers[order]
        return Int4Weight(numbers, scales, whole_zeros, min(cut.group_size, numbers.shape[0]), order)

    def _order(
        self, weights: WeightReader, name: str, columns: int, group_size: int, part: Slice | None
    ) -> Tensor | None:
        """[K] indices of the inputs sorted by group; None: they are in order already."""
        tensor = f"{name}.g_idx"
        if not self._quantization.reordered:
            weights.ignore(tensor)  # redundant: neighbors share a group
            return None
        groups = weights.tensor(tensor, (columns,), torch.int32).to(torch.int64)
        in_order = torch.arange(columns, device=groups.device) // group_size
        if torch.equal(groups, in_order):
            return None
        order = groups.argsort(stable=True)
        if not torch.equal(groups[order], in_order):
            raise ConfigError(
                f"{tensor}: does not assign {group_size} inputs to each of {columns // group_size} groups; the "
                "checkpoint is damaged or group_size in config.json is wrong"
            )
        if part is not None and part.axis == 1:
            raise ConfigError(
                f"{name}: its groups hold inputs in any order (desc_act), so ranks cannot share the {columns} "
                "inputs; use --tp 1, or a checkpoint without desc_act"
            )
        return order


def _skip_bias_of_zeros(weights: WeightReader, name: str, rows: int) -> None:
    """Ignore a bias of zeros: older exports store one for layers without bias. Any other bias stays unexpected."""
    if weights.shape(name, (rows,)) == (rows,) and not weights.peek(name, (rows,)).any():
        weights.ignore(name)
