"""Huge pages for memory that exists already: the weights, once they are loaded.

A decode step reads all weights once. In pages of 4 KB that is a page walk for each of them (two nested ones in a
virtual machine), the core's prefetcher stops at each of them, and afterwards the table of addresses knows nothing any
more of what Python needs between two steps. Weights lie in hundreds of allocations, most of them smaller than a huge
page, so they are not asked for one by one: what this process has in its memory when loading is done is moved, wherever
it stands close together (`MADV_COLLAPSE`, Linux 6.1). The addresses stay.

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

logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES: Final = 2 << 20
MADV_HUGEPAGE: Final = 14
MADV_COLLAPSE: Final = 25

_LEAST_FILLED: Final = 0.9
"""Of a mapping: what nobody has touched would become resident, too."""
_SMAPS: Final = Path("/proc/self/smaps")
_SETTING: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAPPING: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p [0-9a-f]+ [0-9a-f:]+ 0 *(?:\[heap\])?\n")
_OTHER_MAPPING: Final = re.compile(r"[0-9a-f]+-[0-9a-f]+ ")

Madvise = Callable[[int, int, int], int]
"""(address, bytes, advice) -> 0, or the number of the system's error."""


class Mapping(NamedTuple):
    """Private memory of this process that is no file's."""

    start: int
    stop: int
    resident_bytes: int

    def inner(self) -> tuple[int, int]:
        """(address, bytes) of the whole huge pages in it."""
        start = -(-self.start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        return start, max(0, self.stop // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES - start)


def collapse_resident_memory() -> int:
    """Move what is resident of this process into huge pages; returns the bytes that moved, 0 where none may.

    Only speed depends on it: a system that has no huge pages, or whose owner wants none, is left alone.
    """
    madvise = find_madvise()
    if madvise is None or not _allowed():
        return 0
    started_s = time.perf_counter()
    try:
        with _SMAPS.open() as lines:
            found = list(mappings(lines))
    except OSError as error:  # a sandbox may show no process its memory
        logger.info("huge_pages=none: %s", error)
        return 0
    moved_bytes = collapse(found, madvise)
    taken_ms = (time.perf_counter() - started_s) * 1e3
    logger.info("huge_pages_mib=%.0f huge_pages_ms=%.0f", moved_bytes / (1 << 20), taken_ms)
    return moved_bytes


def collapse(found: Iterable[Mapping], madvise: Madvise) -> int:
    """Move those mappings that are filled; where the kernel cannot do it now it is asked to do so in time."""
    moved_bytes = 0
    for mapping in list(found):  # before anything of it changes
        start, num_bytes = mapping.inner()
        if num_bytes and mapping.resident_bytes >= _LEAST_FILLED * (mapping.stop - mapping.start):
            madvise(start, num_bytes, MADV_HUGEPAGE)
            moved_bytes += _collapse_range(start, num_bytes, madvise)
    return moved_bytes


def _collapse_range(start: int, num_bytes: int, madvise: Madvise) -> int:
    """Whole huge pages. A call ends at the first one of which nobody has touched anything: then they go one by one."""
    error = madvise(start, num_bytes, MADV_COLLAPSE)
    if error != errno.EINVAL:
        return 0 if error else num_bytes
    moved_bytes = 0
    for address in range(start, start + num_bytes, HUGE_PAGE_BYTES):
        error = madvise(address, HUGE_PAGE_BYTES, MADV_COLLAPSE)
        if error in (
            errno.ENOMEM,
            errno.EBUSY,
        ):  # the system or the container has none left: a further try would look
            break
        if error == 0:
            moved_bytes += HUGE_PAGE_BYTES
    return moved_bytes


def mappings(lines: Iterable[str]) -> Iterator[Mapping]:
    """Those of a file like `/proc/self/smaps`."""
    where: tuple[int, int] | None = None
    for line in lines:
        if (found := _MAPPING.fullmatch(line)) is not None:
            where = int(found[1], 16), int(found[2], 16)
        elif _OTHER_MAPPING.match(line):
            where = None
        elif where is not None and line.startswith("Rss:"):
            yield Mapping(*where, resident_bytes=int(line.split()[1]) << 10)


def find_madvise() -> Madvise | None:
    """The system's; None where there is none of this kind."""
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def madvise(address: int, num_bytes: int, advice: int) -> int:
        return ctypes.get_errno() if function(address, num_bytes, advice) else 0

    return madvise


def _allowed() -> bool:
    """Whether the system's owner lets those have huge pages who ask: `MADV_COLLAPSE` alone would not care."""
    try:
        return "[never]" not in _SETTING.read_text()
    except OSError:
        return False
