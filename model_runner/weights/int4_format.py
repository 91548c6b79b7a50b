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
from .fp8_format import read_plain
from .reader import Slice, WeightReader

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


class Int4Cut:
    """The groups and words of a weight that a rank takes.

    Attributes:
        group_size: inputs per group; with a single group, all inputs.
        num_groups: groups of the whole weight.
    """

    def __init__(
        self, quantization: QuantizationSpec, name: str, shape: tuple[int, int], part: Slice | None
    ) -> None:
        """Check that the weight has whole words and groups, and is cut between them.

        Raises:
            ConfigError: the sizes do not divide, or a cut lies inside a word or a group.
        """
        rows, columns = shape
        self.group_size = quantization.group_size or columns
        if rows % PER_WORD or columns % PER_WORD or columns % self.group_size:
            raise ConfigError(
                f"{name}: a weight of {rows} outputs and {columns} inputs cannot be stored as {quantization.method} "
                f"with words of {PER_WORD} values and groups of {self.group_size} inputs; config.json does not fit it"
            )
        self.num_groups = columns // self.group_size
        self._part = part
        if part is None:
            return
        step = PER_WORD if part.axis == 0 or self.num_groups == 1 else self.group_size
        if part.start % step or part.stop % step:
            what = "outputs" if part.axis == 0 else "inputs"
            raise ConfigError(
                f"{name}: a rank takes {what} {part.start} to {part.stop - 1}, but {step} neighbors share "
                f"{'a word' if step == PER_WORD else 'a scale'} and cannot be split; use a smaller --tp"
            )

    def numbers(self, outputs_per_place: int, inputs_per_place: int) -> list[Slice] | None:
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

    def groups(self, outputs_per_place: int) -> list[Slice] | None:
        """This rank's slice of a tensor [groups, outputs]; a single group is shared by all ranks."""
        if self._part is None or (self._part.axis == 1 and self.num_groups == 1):
            return None
        return self.numbers(outputs_per_place, self.group_size)


def read_scales(weights: WeightReader, name: str, shape: tuple[int, int], part: list[Slice] | None) -> Tensor:
    """[groups, outputs] in float16, the dtype in which they are stored, unless a value does not fit into it."""
    scales = weights.stacked([name], [shape], torch.float32, part)
    narrow = scales.to(torch.float16)
    return narrow if torch.equal(narrow.to(torch.float32), scales) else scales


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
