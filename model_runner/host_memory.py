"""`reserve`: large tensors in the host's memory, in huge pages where the system has them.

A decode reads keys and values from all over a pool. In pages of 4 KB the core's table of addresses (4,096 entries, 16
MB) does not reach that far, and a look-up goes to memory, too: a fifth of the time of attention over 64 x 512 tokens.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from .huge_pages import HUGE_PAGE_BYTES, MADV_HUGEPAGE, find_madvise

_PLAIN_BYTES: Final = 4 << 20
"""At the beginning of each tensor: whoever uses little of it pays for no huge pages. 60 of them are 120 MB."""


def reserve(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory that nobody has written; what nobody touches is not resident."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if num_bytes < _PLAIN_BYTES + HUGE_PAGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    memory = torch.empty(num_bytes + HUGE_PAGE_BYTES, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE_BYTES
    mine = memory[start : start + num_bytes]
    _ask_for_huge_pages(mine.data_ptr() + _PLAIN_BYTES, num_bytes - _PLAIN_BYTES)
    return mine.view(dtype).view(shape)


def _ask_for_huge_pages(address: int, num_bytes: int) -> None:
    """In whole pages from an address where one begins; a system that has none refuses, and nothing is lost."""
    madvise = find_madvise()
    if madvise is not None:
        madvise(address, num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, MADV_HUGEPAGE)
