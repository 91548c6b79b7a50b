"""What AWQ and GPTQ have in common: whole numbers of 4 bits, eight in a word, and where such a weight can be cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from ...runtime.errors import ConfigError
from .reader import Slice, WeightReader

if TYPE_CHECKING:
    from ...runtime.model_files.quantization import QuantisationSpec

PER_WORD: Final = 8


def unpack(words: Tensor, axis: int, order: Sequence[int] = range(PER_WORD)) -> Tensor:
    """int32 words along an axis of a matrix to the eight numbers of each, uint8; `order`: the nibble of each."""
    shifts = 4 * torch.tensor(list(order), dtype=torch.int32, device=words.device)
    if axis == 1:
        numbers = (words.unsqueeze(2) >> shifts) & 15
        return numbers.to(torch.uint8).view(words.shape[0], -1)
    numbers = (words.unsqueeze(1) >> shifts.view(1, -1, 1)) & 15
    return numbers.to(torch.uint8).view(-1, words.shape[1])


class Int4Cut:
    """Which of a weight's groups and words a rank takes.

    Attributes:
        group_size: inputs of a group, all where there is one.
        num_groups: of the whole weight.
    """

    def __init__(
        self, quantisation: QuantisationSpec, name: str, shape: tuple[int, int], part: Slice | None
    ) -> None:
        """Check that the weight has whole words and groups, and is cut between them.

        Raises:
            ConfigError: it does not, or is not.
        """
        rows, columns = shape
        self.group_size = quantisation.group_size or columns
        if rows % PER_WORD or columns % PER_WORD or columns % self.group_size:
            raise ConfigError(
                f"{name}: a weight of {rows} outputs and {columns} inputs cannot be held as {quantisation.method} with "
                f"words of {PER_WORD} numbers and groups of {self.group_size} inputs; config.json does not fit it"
            )
        self.num_groups = columns // self.group_size
        self._part = part
        if part is None:
            return
        step = PER_WORD if part.axis == 0 or self.num_groups == 1 else self.group_size
        if part.start % step or part.stop % step:
            what = "outputs" if part.axis == 0 else "inputs"
            raise ConfigError(
                f"{name}: a rank takes {what} {part.start} to {part.stop - 1}, but {step} neighbours share "
                f"{'a word' if step == PER_WORD else 'a scale'} and cannot be parted; use a smaller --tp"
            )

    def numbers(self, outputs_per_place: int, inputs_per_place: int) -> list[Slice] | None:
        """This rank's slice of a tensor [inputs, outputs], each place of which stands for so many; None: all of it."""
        if self._part is None:
            return None
        start, stop = self._part.start, self._part.stop
        if self._part.axis == 0:
            return [Slice(1, start // outputs_per_place, stop // outputs_per_place)]
        return [Slice(0, start // inputs_per_place, stop // inputs_per_place)]

    def groups(self, outputs_per_place: int) -> list[Slice] | None:
        """The same of a tensor [groups, outputs]; one group is every rank's."""
        if self._part is None or (self._part.axis == 1 and self.num_groups == 1):
            return None
        return self.numbers(outputs_per_place, self.group_size)


def read_scales(weights: WeightReader, name: str, shape: tuple[int, int], part: list[Slice] | None) -> Tensor:
    """[groups, outputs], in float16, which is what they are stored in, unless they do not fit into it."""
    scales = weights.stacked([name], [shape], torch.float32, part)
    narrow = scales.to(torch.float16)
    return narrow if torch.equal(narrow.to(torch.float32), scales) else scales
