"""Huge pages for weights: packed weights from the first write (`WeightMemory`), all others after loading.

A decode step reads all weights once. With pages of 4 KB each page costs a page walk (two nested ones in a virtual
machine), the core's prefetcher stops at every page boundary, and afterwards the TLB holds no entries for the memory
that Python uses between two steps. Weights are in hundreds of allocations, many of them smaller than a huge page. So
all densely filled memory of the process is moved into huge pages when loading is done (`MADV_COLLAPSE`, Linux 6.1).
Addresses do not change.

Block-quantized weights are in huge pages from the beginning where the system clears a huge page in a fraction of the
time that 512 faults take. It is the other way round in a virtual machine whose host has yet to allocate the memory: a
huge page took 4.7 ms there, 512 faults on memory that was in use before 0.8 ms. Then they are moved like all others.
Most are smaller than a huge page or a few of them, so they share larger pieces of memory.

Memory that is reserved for later belongs to `host_memory`.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES: Final = 2 << 20
MADV_HUGEPAGE: Final = 14
MADV_NOHUGEPAGE: Final = 15
MADV_COLLAPSE: Final = 25

_LEAST_FILLED: Final = 0.9
"""Least resident share of a mapping to move it: the parts never written would become resident too."""
_SMAPS: Final = Path("/proc/self/smaps")
_SETTING: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAPPING: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p [0-9a-f]+ [0-9a-f:]+ 0 *(?:\[heap\])?\n")
_OTHER_MAPPING: Final = re.compile(r"[0-9a-f]+-[0-9a-f]+ ")

Madvise = Callable[[int, int, int], int]
"""(address, bytes, advice) -> 0, or the errno."""


class Mapping(NamedTuple):
    """Private anonymous memory of this process."""

    start: int
    stop: int
    resident_bytes: int

    def inner(self) -> tuple[int, int]:
        """(address, bytes) of the whole huge pages in the mapping."""
        start = -(-self.start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        return start, max(0, self.stop // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES - start)


def collapse_resident_memory() -> int:
    """Move the resident memory of this process into huge pages; returns the bytes moved, 0 if it is not possible.

    This affects only speed. Nothing is done on a system without huge pages, or where they are set to `never`.
    """
    madvise = find_madvise()
    if madvise is None or not _allowed():
        return 0
    started_s = time.perf_counter()
    try:
        with _SMAPS.open() as lines:
            found = list(mappings(lines))
    except OSError as error:  # a sandbox may hide smaps
        logger.info("huge_pages=none: %s", error)
        return 0
    moved_bytes = collapse(found, madvise)
    taken_ms = (time.perf_counter() - started_s) * 1e3
    logger.debug("huge_pages_mib=%.0f huge_pages_ms=%.0f", moved_bytes / (1 << 20), taken_ms)
    return moved_bytes


def collapse(found: Iterable[Mapping], madvise: Madvise) -> int:
    """Move the filled mappings; MADV_HUGEPAGE lets the kernel move the rest later."""
    moved_bytes = 0
    for mapping in list(found):  # read in full, before the mappings change
        start, num_bytes = mapping.inner()
        if num_bytes and mapping.resident_bytes >= _LEAST_FILLED * (mapping.stop - mapping.start):
            madvise(start, num_bytes, MADV_HUGEPAGE)
            moved_bytes += _collapse_range(start, num_bytes, madvise)
    return moved_bytes


def _collapse_range(start: int, num_bytes: int, madvise: Madvise) -> int:
    """Move whole huge pages. A call fails at the first page that was never written; then they are moved one by one."""
    error = madvise(start, num_bytes, MADV_COLLAPSE)
    if error != errno.EINVAL:
        return 0 if error else num_bytes
    moved_bytes = 0
    for address in range(start, start + num_bytes, HUGE_PAGE_BYTES):
        error = madvise(address, HUGE_PAGE_BYTES, MADV_COLLAPSE)
        if error in (
            errno.ENOMEM,
            errno.EBUSY,
        ):  # the system or the container has none left: further calls would search again
            break
        if error == 0:
            moved_bytes += HUGE_PAGE_BYTES
    return moved_bytes


def mappings(lines: Iterable[str]) -> Iterator[Mapping]:
    """The private anonymous mappings in a file like `/proc/self/smaps`."""
    where: tuple[int, int] | None = None
    for line in lines:
        if (found := _MAPPING.fullmatch(line)) is not None:
            where = int(found[1], 16), int(found[2], 16)
        elif _OTHER_MAPPING.match(line):
            where = None
        elif where is not None and line.startswith("Rss:"):
            yield Mapping(*where, resident_bytes=int(line.split()[1]) << 10)


def find_madvise() -> Madvise | None:
    """The system's `madvise`; None if the system is not Linux."""
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def madvise(address: int, num_bytes: int, advice: int) -> int:
        return ctypes.get_errno() if function(address, num_bytes, advice) else 0

    return madvise


def _allowed() -> bool:
    """Whether the system allows huge pages on request; `MADV_COLLAPSE` itself ignores this setting."""
    try:
        return "[never]" not in _SETTING.read_text()
    except OSError:
        return False


_PIECE_BYTES: Final = 16 * HUGE_PAGE_BYTES
_ALIGNMENT: Final = 64
_SMALL_PAGES_S: Final = 1e-3
"""What 512 faults take, and a huge page should not."""


class WeightMemory:
    """Gives memory for weights that live as long as the model; a piece is freed with the last weight in it."""

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)  # the rest of it
        self._in_huge_pages = True  # until the system takes too long for one

    def take(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, aligned to 64 bytes and not initialized; only what is written becomes resident."""
        if num_bytes > _PIECE_BYTES // 2:
            return self._reserve(num_bytes)
        if num_bytes > len(self._piece):
            self._piece = self._reserve(_PIECE_BYTES)
        taken = self._piece[:num_bytes]
        self._piece = self._piece[-(-num_bytes // _ALIGNMENT) * _ALIGNMENT :]
        return taken

    def _reserve(self, num_bytes: int) -> Tensor:
        """Memory that begins with a huge page; a system without huge pages uses others."""
        memory = torch.empty(num_bytes + HUGE_PAGE_BYTES, dtype=torch.uint8)
        start = -memory.data_ptr() % HUGE_PAGE_BYTES
        address, inner_bytes = Mapping(memory.data_ptr(), memory.data_ptr() + len(memory), 0).inner()
        if self._in_huge_pages and inner_bytes and (madvise := find_madvise()) is not None:
            madvise(address, inner_bytes, MADV_HUGEPAGE)
            before_s = time.thread_time()  # of this thread: what other processes take does not count
            memory[start] = 0
            self._in_huge_pages = time.thread_time() - before_s < _SMALL_PAGES_S
            if not self._in_huge_pages:
                madvise(address, inner_bytes, MADV_NOHUGEPAGE)
        return memory[start : start + num_bytes]
