"""`StoredRows`: a block-quantized weight as the rows of a GGUF file, until a kernel packs it.

A GGUF store returns it without reading the file. Kernels pack the raw rows in one pass (`packed_blocks`); for
everything else `unpacked` gives the same weight as a `BlockWeight`.
"""

# Shapes: K inputs, N outputs.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ....models.spec.quantization import WIDEST, BlockForm
from ..quantized_weights import BlockWeight, stack_blocks

if TYPE_CHECKING:
    from .tensor_rows import TensorRows


@dataclass(frozen=True, eq=False)
class StoredRows:
    """The outputs of one or several tensors, one after the other.

    Attributes:
        tensors: at least one; all have the same inputs.
        padding: outputs of zeros at the end.
    """

    tensors: tuple[TensorRows, ...]
    padding: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return sum(one.shape[0] for one in self.tensors) + self.padding, self.tensors[0].shape[1]

    @cached_property
    def form(self) -> BlockForm:
        """The form of all outputs; see `stack_blocks`."""
        first = self.tensors[0].form
        if not all(one.form.is_held_like(first) for one in self.tensors[1:]):
            return WIDEST
        return first if self.is_in_superblocks else first._replace(superblock_bytes=0)

    @cached_property
    def is_in_superblocks(self) -> bool:
        """Whether kernels hold the weight in the layout of the file; see `BlockForm`."""
        form = self.tensors[0].form
        return all(one.form == form and one.superblocks is not None for one in self.tensors)

    @property
    def num_bytes(self) -> int:
        """Memory in the layout of the kernels, as that of `unpacked`."""
        return self.form.num_bytes(*self.shape)

    @property
    def is_finite(self) -> bool:
        """Whether all scales and minima are finite; integers always are."""
        return all(one.is_finite for one in self.tensors)

    def unpacked(self) -> BlockWeight:
        """The weight as a `BlockWeight`."""
        weight = stack_blocks([one.unpacked() for one in self.tensors])
        return weight.padded(self.shape[0]) if self.padding else weight

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """[N, K], rounded once."""
        weight = torch.cat([one.dequantized(dtype) for one in self.tensors])
        return F.pad(weight, (0, 0, 0, self.padding)) if self.padding else weight

    def padded(self, rows: int) -> StoredRows:
        """The weight with outputs of zeros at the end, [rows, K]."""
        return replace(self, padding=self.padding + rows - self.shape[0])

    def stacks_with(self, other: StoredRows) -> bool:
        """Whether both can become one weight with the outputs of both."""
        return self.shape[1] == other.shape[1]

    def is_held_like(self, other: StoredRows) -> bool:
        """Whether that weight takes the memory of both."""
        mine, others = (one.form._replace(is_exact=True) for one in (self, other))
        return mine == others

    def release(self) -> None:
        """Give back the memory of the file's pages; see `TensorRows`."""
        for one in self.tensors:
            one.release()


def stack_rows(weights: Sequence[StoredRows]) -> StoredRows:
    """One weight with the outputs of all; they must stack, and only the last may have padding."""
    assert not any(one.padding for one in weights[:-1])
    return StoredRows(tuple(one for weight in weights for one in weight.tensors), weights[-1].padding)
