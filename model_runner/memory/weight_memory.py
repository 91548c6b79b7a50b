"""`WeightMemory`: memory for packed weights, in huge pages from the first write on.

The system clears a huge page in a fraction of the time that 512 faults take, and nothing has to be moved later
(`huge_pages`). Most weights are smaller than a huge page or a few of them, so they share larger pieces of memory.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from .huge_pages import HUGE_PAGE_BYTES, request_huge_pages

_PIECE_BYTES: Final = 16 * HUGE_PAGE_BYTES
_ALIGNMENT: Final = 64


class WeightMemory:
    """Gives memory for weights that live as long as the model; a piece is freed with the last weight in it."""

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)  # the rest of it

    def take(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, aligned to 64 bytes and not initialized; only what is written becomes resident."""
        if num_bytes > _PIECE_BYTES // 2:
            return _reserve(num_bytes)
        if num_bytes > len(self._piece):
            self._piece = _reserve(_PIECE_BYTES)
        taken = self._piece[:num_bytes]
        self._piece = self._piece[-(-num_bytes // _ALIGNMENT) * _ALIGNMENT :]
        return taken


def _reserve(num_bytes: int) -> Tensor:
    """Memory that begins with a huge page; a system without huge pages uses others."""
    memory = torch.empty(num_bytes + HUGE_PAGE_BYTES, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE_BYTES
    request_huge_pages(memory.data_ptr(), len(memory))
    return memory[start : start + num_bytes]
