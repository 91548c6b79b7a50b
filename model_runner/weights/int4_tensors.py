"""Common parts of AWQ and GPTQ: 4-bit integers, eight in an int32 word, and the places where a weight can be cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from ...runtime.errors import ConfigError
from .reader import Slice, WeightReader

if TYPE_CHECKING:
    from ...models.spec.quantization import QuantizationSpec

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
