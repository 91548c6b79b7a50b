"""Large tensors in host memory: `reserve`, in huge pages where the system has them, and `PreFaulter`.

A decode reads keys and values from all parts of a pool. With pages of 4 KB the TLB (4,096 entries) covers 16 MB, and a
miss reads the page table from memory: a fifth of the time of attention over 64 x 512 tokens.

Reserved memory becomes resident when it is first written. The system then clears it in the middle of a step, for all
layers at once. In a virtual machine, where the hypervisor may have to allocate the memory first, 60 huge pages took
0.3 s in a decode step that takes 0.08 s without them. So `PreFaulter` makes memory resident before, while no request
waits.
"""

from __future__ import annotations

import errno
import logging
import mmap
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import torch
from torch import Tensor

from .huge_pages import HUGE_PAGE_BYTES, MADV_HUGEPAGE, Madvise, find_madvise

logger = logging.getLogger(__name__)

MADV_POPULATE_WRITE: Final = 23

_SMALL_PAGE: Final = mmap.PAGESIZE
_PLAIN_BYTES: Final = 4 << 20
"""Bytes at the beginning of each tensor without huge pages: a barely used pool takes little memory. With huge pages
60 tensors take at least 120 MB."""


def reserve(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialized memory; only the parts that are written become resident."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if num_bytes < _PLAIN_BYTES + HUGE_PAGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    memory = torch.empty(num_bytes + HUGE_PAGE_BYTES, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE_BYTES
    mine = memory[start : start + num_bytes]
    _ask_for_huge_pages(mine.data_ptr() + _PLAIN_BYTES, num_bytes - _PLAIN_BYTES)
    return mine.view(dtype).view(shape)


def _ask_for_huge_pages(address: int, num_bytes: int) -> None:
    """Ask for huge pages from the first page boundary on; a system without huge pages refuses, which is harmless."""
    madvise = find_madvise()
    if madvise is not None:
        madvise(address, num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, MADV_HUGEPAGE)


class _Piece(NamedTuple):
    """Part of a tensor's memory, a huge page or less; `begins_at`: the share of the tensor before it."""

    begins_at: float
    address: int
    num_bytes: int


class PreFaulter:
    """Makes tensors resident from their beginnings on, one piece of one tensor at a time; their values do not change.

    On systems without this call (Linux before 5.14, others) memory becomes resident when it is written.
    """

    def __init__(self, tensors: Sequence[Tensor], madvise: Madvise | None = None) -> None:
        """Take the tensors.

        Args:
            madvise: replaces the system's call.
        """
        self._madvise = madvise or find_madvise()
        self._pieces = sorted(piece for tensor in tensors for piece in _pieces(tensor))
        self._next = 0

    def fault_in_some(self, share: float) -> bool:
        """Make the next piece in the first `share` of each tensor resident; returns whether there are more of them."""
        if not self._has_more(share):
            return False
        assert self._madvise is not None
        _, address, num_bytes = self._pieces[self._next]
        error = self._madvise(address, num_bytes, MADV_POPULATE_WRITE)
        self._next += 1
        if error:  # the system does not support or refuses it; serving goes on without
            logger.info("populate=none: %s", errno.errorcode.get(error, error))
            self._next = len(self._pieces)
        return self._has_more(share)

    def _has_more(self, share: float) -> bool:
        if self._madvise is None or self._next == len(self._pieces):
            return False
        return self._pieces[self._next].begins_at < share


def _pieces(tensor: Tensor) -> list[_Piece]:
    """Cut a tensor's memory at the boundaries of huge pages."""
    start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    first_cut = (start // HUGE_PAGE_BYTES + 1) * HUGE_PAGE_BYTES
    cuts = [start, *range(first_cut, stop, HUGE_PAGE_BYTES), stop]
    return [
        _Piece(
            (begin - start) / tensor.nbytes,
            begin // _SMALL_PAGE * _SMALL_PAGE,
            end - begin // _SMALL_PAGE * _SMALL_PAGE,
        )
        for begin, end in pairwise(cuts)
    ]
