"""`AwqParts`, `GptqParts`, `CompressedIntParts`: integer weights of AWQ, GPTQ and compressed-tensors exports.

AWQ, for its gemm kernels (Lin et al. 2023; casper-hansen/AutoAWQ):

    <name>.qweight  int32 [K, N/8]   one word packs the 4-bit integers of eight neighboring outputs
    <name>.qzeros   int32 [K/group, N/8], the same packing
    <name>.scales   [K/group, N]

Nibble i of a word holds output (0, 2, 4, 6, 1, 3, 5, 7)[i] of its eight. A weight is (integer - zero) * scale.

GPTQ (Frantar et al. 2022; AutoGPTQ, ModelCloud/GPTQModel):

    <name>.qweight  int32 [K/8, N]   4-bit integers of eight neighboring inputs, the first in the lowest bits;
                    int32 [K/4, N]   or 8-bit integers of four
    <name>.qzeros   int32 [K/group, N/8 or N/4], of neighboring outputs; format version 1 stores zero - 1
    <name>.scales   [K/group, N]
    <name>.g_idx    int32 [K]        the group of each input

With `desc_act` inputs are quantized in the order of their importance, and the inputs of a group are not adjacent. Rows
are then sorted by group here, and activations are permuted before the matmul.

Integers of compressed-tensors (vllm-project/compressed-tensors, llm-compressor):

    <name>.weight_packed      int32 [N, K/8] or [N, K/4], of neighboring inputs, the first in the lowest bits
    <name>.weight             int8 [N, K]                  instead, if they are not packed
    <name>.weight_scale       [N, K/group], [N, 1] or [1]
    <name>.weight_zero_point  int32 [N/8 or N/4, K/group], of neighboring outputs, or int8 [N, K/group], or none
    <name>.weight_g_idx       int32 [K], with `actorder` of groups: as GPTQ's
    <name>.weight_shape       [N, K]

    <name>.weight             uint8 [N/2, K]               in ModelOpt's AWQ: of two outputs, the first in the low half

Packed integers have half their range added, which makes them unsigned; bytes are signed.

torchao (pytorch/ao:torchao/quantization/quantize_/workflows/int4/int4_tensor.py), as `safetensors_header` names it:

    <name>.weight             uint8 [N, K/2]       signed integers of two neighboring inputs, the first in the low half
    <name>.weight_scale       [K/group, N]
    <name>.weight_zero_point  [K/group, N] floats  weight = integer * scale + zero point
"""

# Shapes: [N, K] a whole weight: N outputs, K inputs.

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from ...runtime.errors import ConfigError
from ..kernels.quantized_weights import BLOCK_SIZE, BlockWeight, IntWeight
from .reader import ModuleWeight, Slice, read_plain

if TYPE_CHECKING:
    from ...models.spec.quantization import QuantizationSpec
    from ..kernels.quantized import Part


def unpack(words: Tensor, axis: int, order: Sequence[int] = range(8), bits: int = 4) -> Tensor:
    """Unpack int32 words along an axis of a matrix into uint8 values; `order`: the place of each value in its word."""
    shifts = bits * torch.tensor(list(order)[: 32 // bits], dtype=torch.int32, device=words.device)
    mask = (1 << bits) - 1
    if axis == 1:
        numbers = (words.unsqueeze(2) >> shifts) & mask
        return numbers.to(torch.uint8).view(words.shape[0], -1)
    numbers = (words.unsqueeze(1) >> shifts.view(1, -1, 1)) & mask
    return numbers.to(torch.uint8).view(-1, words.shape[1])


class PackedTensors:
    """The tensors of a weight in AWQ or GPTQ, or a rank's part of each.

    Attributes:
        group_size: inputs per group; with a single group, all inputs.
        per_word: integers in a word.
    """

    def __init__(self, quantization: QuantizationSpec, module: ModuleWeight) -> None:
        """Check that the weight has whole words and groups, and is cut between them.

        Raises:
            ConfigError: the sizes do not divide, or a cut lies inside a word or a group.
        """
        self._reader, self._name, self._shape, self._part = module
        name, (rows, columns), part = module.name, module.shape, module.part
        self.group_size = quantization.group_size or columns
        self.per_word = 32 // quantization.bits
        if rows % self.per_word or columns % self.per_word or columns % self.group_size:
            raise ConfigError(
                f"{name}: a weight of {rows} outputs and {columns} inputs cannot be stored as {quantization.method} "
                f"with words of {self.per_word} values and groups of {self.group_size} inputs; config.json does "
                "not fit it"
            )
        self._num_groups = columns // self.group_size
        if part is None:
            return
        step = self.per_word if part.axis == 0 or self._num_groups == 1 else self.group_size
        if part.start % step or part.stop % step:
            what = "outputs" if part.axis == 0 else "inputs"
            raise ConfigError(
                f"{name}: a rank takes {what} {part.start} to {part.stop - 1}, but {step} neighbors share "
                f"{'a word' if step == self.per_word else 'a scale'} and cannot be split; use a smaller --tp"
            )

    def words(self, *, outputs: int = 1, inputs: int = 1) -> Tensor:
        """`qweight`, int32; a word has the integers of so many `outputs` or `inputs`."""
        rows, columns = self._shape
        shape, part = (columns // inputs, rows // outputs), self._slice(outputs, inputs)
        return self._reader.stacked([f"{self._name}.qweight"], [shape], torch.int32, part)

    def zeros(self) -> Tensor:
        """`qzeros`, int32 [groups, outputs / per_word]."""
        shape, part = (self._num_groups, self._shape[0] // self.per_word), self._groups(self.per_word)
        return self._reader.stacked([f"{self._name}.qzeros"], [shape], torch.int32, part)

    def scales(self) -> Tensor:
        """[groups, outputs] in float16, the dtype in which they are stored, unless a value does not fit into it."""
        shape, part = (self._num_groups, self._shape[0]), self._groups(1)
        return _narrowed(self._reader.stacked([f"{self._name}.scales"], [shape], torch.float32, part))

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
        stored = PackedTensors(self._quantization, module)
        numbers = unpack(stored.words(outputs=stored.per_word), 1, NIBBLE_OF_OUTPUT)
        zeros = unpack(stored.zeros(), 1, NIBBLE_OF_OUTPUT)
        return IntWeight(numbers, stored.scales(), zeros, min(stored.group_size, numbers.shape[0]))


class GptqParts:
    """`PartReader` of GPTQ exports."""

    def __init__(self, quantization: QuantizationSpec) -> None:
        self._quantization = quantization

    def read(self, module: ModuleWeight) -> Part:
        if _is_plain(self._quantization, module):
            return read_plain([module])
        stored, bits = PackedTensors(self._quantization, module), self._quantization.bits
        tensor, order = f"{module.name}.g_idx", None
        if self._quantization.reordered:
            order = order_of_groups(module, tensor, stored.group_size, "desc_act")
        else:
            module.reader.ignore(tensor)  # redundant: neighbors share a group
        numbers = unpack(stored.words(inputs=stored.per_word), 0, bits=bits)
        zeros = unpack(stored.zeros(), 1, bits=bits)
        _skip_bias_of_zeros(module)
        if self._quantization.zeros_less_one:
            zeros = (zeros + 1) & ((1 << bits) - 1)  # the largest one means 0: its successor does not occur
        if order is not None:
            numbers = numbers[order]
        size = min(stored.group_size, numbers.shape[0])
        return IntWeight(numbers, stored.scales(), zeros, size, order, bits=bits)


class CompressedIntParts:
    """`PartReader` of integers in compressed-tensors exports."""

    def __init__(self, quantization: QuantizationSpec) -> None:
        self._quantization = quantization

    def read(self, module: ModuleWeight) -> Part:
        form = self._quantization
        weights, name, (rows, columns), part = module
        size = form.group_size or columns
        if form.is_plain(name) or weights.shape(f"{name}.weight_scale", (rows, columns // size)) is None:
            return read_plain([module])
        per_word, zero = 32 // form.bits, 1 << (form.bits - 1)
        num_groups = columns // size
        if columns % size or (form.packed and columns % per_word):
            raise ConfigError(
                f"{name}: a weight of {rows} outputs and {columns} inputs cannot be stored as compressed-tensors with "
                f"words of {per_word} values and groups of {size} inputs; config.json does not fit it"
            )
        step = max(per_word if form.packed else 1, size if num_groups > 1 else 1)
        if part is not None and part.axis == 1 and (part.start % step or part.stop % step):
            raise ConfigError(
                f"{name}: a rank takes inputs {part.start} to {part.stop - 1}, but {step} neighbors share a "
                f"{'scale' if num_groups > 1 else 'word'} and cannot be split; use a smaller --tp"
            )
        numbers = self._numbers(module, form)
        scales = self._scales(module, num_groups)
        zeros = torch.full(scales.shape, zero, dtype=torch.uint8, device=scales.device)
        if not form.symmetric:
            zeros = self._zeros(module, form, num_groups)
        for unused in ("weight_shape", "weight_zero_point", "weight_scale_2"):
            weights.ignore(f"{name}.{unused}")
        tensor = f"{name}.weight_g_idx"
        order = None
        if form.reordered and weights.shape(tensor, (columns,)) is not None:
            order = order_of_groups(module, tensor, size, "actorder")
        if order is not None:
            numbers = numbers[:, order]
        if part is not None:
            scales, zeros = (_of_part(one, part, size, num_groups) for one in (scales, zeros))
        return IntWeight(numbers.t(), scales, zeros, min(size, numbers.shape[1]), order, bits=form.bits)

    def _numbers(self, module: ModuleWeight, form: QuantizationSpec) -> Tensor:
        """[N, K] uint8, or a rank's part of it."""
        weights, name, (rows, columns), part = module
        halves = (rows // 2, columns)
        if form.bits == 4 and not form.packed and weights.shape(f"{name}.weight", (rows, columns)) == halves:
            pairs = weights.tensor(f"{name}.weight", halves, torch.uint8)
            whole = torch.stack([pairs & 15, pairs >> 4], dim=1).flatten(0, 1) ^ 8  # plus 8
            return whole if part is None else whole.narrow(part.axis, part.start, part.stop - part.start)
        if not form.packed:
            slices = None if part is None else [part]
            signed = weights.stacked([f"{name}.weight"], [(rows, columns)], torch.int8, slices)
            numbers = signed.add_(-128 if form.bits == 8 else 8).view(torch.uint8)
            if form.bits == 4 and (numbers > 15).any():
                raise ConfigError(
                    f"{name}: holds integers outside of -8 to 7, but by config.json they have 4 bits; the weights and "
                    "the configuration do not belong together"
                )
            return numbers
        per_word = 32 // form.bits
        if part is not None and part.axis == 1:
            part = Slice(1, part.start // per_word, part.stop // per_word)
        words = weights.stacked(
            [f"{name}.weight_packed"],
            [(rows, columns // per_word)],
            torch.int32,
            None if part is None else [part],
        )
        return unpack(words, 1, bits=form.bits)

    def _scales(self, module: ModuleWeight, num_groups: int) -> Tensor:
        """[G, N], of the whole weight."""
        weights, name, (rows, _), _ = module
        tensor, whole = f"{name}.weight_scale", (rows, num_groups)
        found = weights.shape(tensor, whole)
        if found in ((), (1,)):  # of the whole weight
            return _narrowed(weights.tensor(tensor, found, torch.float32).repeat(num_groups, rows))
        stored = (rows,) if found == (rows,) and num_groups == 1 else whole
        return _narrowed(weights.tensor(tensor, stored, torch.float32).view(whole).t().contiguous())

    def _zeros(self, module: ModuleWeight, form: QuantizationSpec, num_groups: int) -> Tensor:
        """[G, N] uint8, of the whole weight."""
        weights, name, (rows, _), _ = module
        tensor, zero = f"{name}.weight_zero_point", 1 << (form.bits - 1)
        if form.packed:
            words = weights.tensor(tensor, (-(-rows * form.bits // 32), num_groups), torch.int32)
            return unpack(words, 0, bits=form.bits)[:rows].t().contiguous()
        found = weights.shape(tensor, (rows, num_groups))
        if found in ((), (1,)):
            signed = weights.tensor(tensor, found, torch.int8).expand(rows, num_groups)
        else:
            signed = weights.tensor(tensor, (rows, num_groups), torch.int8)
        return (signed.to(torch.int16) + zero).to(torch.uint8).t().contiguous()


class TorchAoParts:
    """`PartReader` of packed integers of torchao (`Int4Tensor`); its others are as those of compressed-tensors."""

    def __init__(self, quantization: QuantizationSpec) -> None:
        self._quantization = quantization

    def read(self, module: ModuleWeight) -> Part:
        weights, name, (rows, columns), part = module
        groups = (columns // self._quantization.group_size, rows)
        if weights.shape(f"{name}.weight_scale", groups) is None or self._quantization.is_plain(name):
            return read_plain([module])
        size = self._quantization.group_size
        if columns % size:
            raise ConfigError(
                f"{name}: {columns} inputs are no whole groups of {size}; config.json does not fit the weights"
            )
        if part is not None and part.axis == 1 and (part.start % size or part.stop % size):
            raise ConfigError(
                f"{name}: a rank takes inputs {part.start} to {part.stop - 1}, but {size} neighbors share a scale and "
                "cannot be split; use a smaller --tp"
            )
        pairs = weights.tensor(f"{name}.weight", (rows, columns // 2), torch.uint8)
        signed = torch.stack([pairs & 15, pairs >> 4], dim=2).flatten(1) ^ 8  # plus 8
        scales, zeros = (
            weights.tensor(f"{name}.weight_{kind}", groups, torch.float32).t()
            for kind in ("scale", "zero_point")
        )
        scales, minima = (
            one.repeat_interleave(size // BLOCK_SIZE, dim=1) for one in (scales, zeros - 8 * scales)
        )
        blocks = BlockWeight(signed, scales, minima, 0, 4)
        if part is None:
            return blocks
        if part.axis == 0:
            rows_of = slice(part.start, part.stop)
            return BlockWeight(signed[rows_of], scales[rows_of], minima[rows_of], 0, 4)
        return blocks.take_blocks(torch.arange(part.start // BLOCK_SIZE, part.stop // BLOCK_SIZE))


def _of_part(groups: Tensor, part: Slice, group_size: int, num_groups: int) -> Tensor:
    """A rank's part of a tensor [groups, outputs]; a single group is shared by all ranks."""
    if part.axis == 0:
        return groups[:, part.start : part.stop]
    return groups if num_groups == 1 else groups[part.start // group_size : part.stop // group_size]


def _narrowed(scales: Tensor) -> Tensor:
    """Scales in float16, unless a value does not fit into it."""
    narrow = scales.to(torch.float16)
    return narrow if torch.equal(narrow.to(torch.float32), scales) else scales


def order_of_groups(module: ModuleWeight, tensor: str, group_size: int, setting: str) -> Tensor | None:
    """[K] indices of the inputs sorted by group, from a tensor [K] with the group of each; None: they are in order.

    Raises:
        ConfigError: the groups have other sizes, or ranks share the inputs.
    """
    weights, name, (_, columns), part = module
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
            f"{name}: its groups hold inputs in any order ({setting}), so ranks cannot share the {columns} "
            f"inputs; use --tp 1, or a checkpoint without {setting}"
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
