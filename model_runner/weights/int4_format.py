"""`AwqParts`, `GptqParts`: 4-bit weights of AWQ and GPTQ exports, in one packed layout (`Int4Tensors`).

AWQ, for its gemm kernels (Lin et al. 2023; casper-hansen/AutoAWQ):

    <name>.qweight  int32 [K, N/8]   one word packs the 4-bit integers of eight neighboring outputs
    <name>.qzeros   int32 [K/group, N/8], the same packing
    <name>.scales   [K/group, N]

Nibble i of a word holds output (0, 2, 4, 6, 1, 3, 5, 7)[i] of its eight. A weight is (integer - zero) * scale.

GPTQ (Frantar et al. 2022; AutoGPTQ, ModelCloud/GPTQModel):

    <name>.qweight  int32 [K/8, N]   4-bit integers of eight neighboring inputs, the first in the lowest bits
    <name>.qzeros   int32 [K/group, N/8], of eight neighboring outputs; format version 1 stores zero - 1
    <name>.scales   [K/group, N]
    <name>.g_idx    int32 [K]        the group of each input

With `desc_act` inputs are quantized in the order of their importance, and the inputs of a group are not adjacent. Rows
are then sorted by group here, and activations are permuted before the matmul.
"""

# Shapes: [N, K] a whole weight: N outputs, K inputs.

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from ...runtime.errors import ConfigError
from ..kernels.quantized_weights import Int4Weight
from .reader import ModuleWeight, Slice, read_plain

if TYPE_CHECKING:
    from ...models.spec.quantization import QuantizationSpec
    from ..kernels.quantized import Part

PER_WORD: Final = 8


def unpack(words: Tensor, axis: int, order: Sequence[int] = range(PER_WORD)) -> Tensor:
    """Unpack int32 words along an axis of a matrix into eight uint8 values each; `order`: the nibble of each value."""
    shifts = 4 * torch.tensor(list(order), dtype=torch.int32, device=words.device)
    if axis == 1:
        numbers = (words.unsqueeze(2) >> shifts) & 15
        return numbers.to(torch.uint8).view(words.shape[0], -1)
    numbers = (words.unsqueeze(1) >> shifts.view(1, -1, 1)) & 15
    return numbers.to(torch.uint8).view(-1, words.shape[1])


class Int4Tensors:
    """The packed tensors of a weight, or a rank's part of each.

    Attributes:
        group_size: inputs per group; with a single group, all inputs.
    """

    def __init__(self, quantization: QuantizationSpec, module: ModuleWeight) -> None:
        """Check that the weight has whole words and groups, and is cut between them.

        Raises:
            ConfigError: the sizes do not divide, or a cut lies inside a word or a group.
        """
        self._reader, self._name, self._shape, self._part = module
        name, (rows, columns), part = module.name, module.shape, module.part
        self.group_size = quantization.group_size or columns
        if rows % PER_WORD or columns % PER_WORD or columns % self.group_size:
            raise ConfigError(
                f"{name}: a weight of {rows} outputs and {columns} inputs cannot be stored as {quantization.method} "
                f"with words of {PER_WORD} values and groups of {self.group_size} inputs; config.json does not fit it"
            )
        self._num_groups = columns // self.group_size
        if part is None:
            return
        step = PER_WORD if part.axis == 0 or self._num_groups == 1 else self.group_size
        if part.start % step or part.stop % step:
            what = "outputs" if part.axis == 0 else "inputs"
            raise ConfigError(
                f"{name}: a rank takes {what} {part.start} to {part.stop - 1}, but {step} neighbors share "
                f"{'a word' if step == PER_WORD else 'a scale'} and cannot be split; use a smaller --tp"
            )

    def words(self, *, outputs: int = 1, inputs: int = 1) -> Tensor:
        """`qweight`, int32; a word has 4-bit integers of so many `outputs` or `inputs`."""
        rows, columns = self._shape
        shape, part = (columns // inputs, rows // outputs), self._slice(outputs, inputs)
        return self._reader.stacked([f"{self._name}.qweight"], [shape], torch.int32, part)

    def zeros(self) -> Tensor:
        """`qzeros`, int32 [groups, outputs / 8]."""
        shape, part = (self._num_groups, self._shape[0] // PER_WORD), self._groups(PER_WORD)
        return self._reader.stacked([f"{self._name}.qzeros"], [shape], torch.int32, part)

    def scales(self) -> Tensor:
        """[groups, outputs] in float16, the dtype in which they are stored, unless a value does not fit into it."""
        shape, part = (self._num_groups, self._shape[0]), self._groups(1)
        scales = self._reader.stacked([f"{self._name}.scales"], [shape], torch.float32, part)
        narrow = scales.to(torch.float16)
        return narrow if torch.equal(narrow.to(torch.float32), scales) else scales

    def _slice(self, outputs_per_place: int, inputs_per_place: int) -> list[Slice] | None:
        """This rank's slice of a packed tensor [inputs, outputs]; None: all of it.

        Args:
            outputs_per_place, inputs_per_place: outputs and inputs that one element of the tensor holds.
        """
        if self._part is None:
            return None
        start, stop = self._part.start, self._part.stop
        if self._part.axis == 0:
            return [Slice(1, start // outputs_per_place, stop // outputs_per_place)]
        return [Slice(0, start // inputs_per_place, stop // inputs_per_place)]

    def _groups(self, outputs_per_place: int) -> list[Slice] | None:
        """This rank's slice of a tensor [groups, outputs]; a single group is shared by all ranks."""
        if self._part is None or (self._part.axis == 1 and self._num_groups == 1):
            return None
        return self._slice(outputs_per_place, self.group_size)


NIBBLE_OF_OUTPUT: Final = (0, 4, 1, 5, 2, 6, 3, 7)


class AwqParts:
    """`PartReader` of AWQ exports."""

    def __init__(self, quantization: QuantizationSpec) -> None:
        self._quantization = quantization

    def read(self, module: ModuleWeight) -> Part:
        if _is_plain(self._quantization, module):
            return read_plain([module])
        stored = Int4Tensors(self._quantization, module)
        numbers = unpack(stored.words(outputs=PER_WORD), 1, NIBBLE_OF_OUTPUT)
        zeros = unpack(stored.zeros(), 1, NIBBLE_OF_OUTPUT)
        return Int4Weight(numbers, stored.scales(), zeros, min(stored.group_size, numbers.shape[0]))


class GptqParts:
    """`PartReader` of GPTQ exports."""

    def __init__(self, quantization: QuantizationSpec) -> None:
        self._quantization = quantization

    def read(self, module: ModuleWeight) -> Part:
        if _is_plain(self._quantization, module):
            return read_plain([module])
        stored = Int4Tensors(self._quantization, module)
        order = self._order(module, stored.group_size)
        numbers, zeros = unpack(stored.words(inputs=PER_WORD), 0), unpack(stored.zeros(), 1)
        _skip_bias_of_zeros(module)
        if self._quantization.zeros_less_one:
            zeros = (zeros + 1) & 15  # a stored 15 means 0: 16 does not occur
        if order is not None:
            numbers = numbers[order]
        return Int4Weight(numbers, stored.scales(), zeros, min(stored.group_size, numbers.shape[0]), order)

    def _order(self, module: ModuleWeight, group_size: int) -> Tensor | None:
        """[K] indices of the inputs sorted by group; None: they are in order already."""
        weights, name, (_, columns), part = module
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


def _is_plain(quantization: QuantizationSpec, module: ModuleWeight) -> bool:
    packed = module.reader.shape(f"{module.name}.qweight", module.shape)
    return packed is None or quantization.is_plain(module.name)


def _skip_bias_of_zeros(module: ModuleWeight) -> None:
    """Ignore a bias of zeros: older exports store one for layers without bias. Any other bias stays unexpected."""
    weights, name, shape = module.reader, f"{module.name}.bias", module.shape[:1]
    if weights.shape(name, shape) == shape and not weights.peek(name, shape).any():
        weights.ignore(name)
