"""Huge pages: which memory is moved into them, and that it is still the same afterwards."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from engine.model_runner.memory import huge_pages
from engine.model_runner.memory.huge_pages import (
    HUGE_PAGE_BYTES,
    MADV_COLLAPSE,
    MADV_HUGEPAGE,
    Mapping,
    collapse,
    mappings,
)

MADV_NOHUGEPAGE: Final = 15

SMAPS = """\
55d0c0000000-55d0c0021000 rw-p 00000000 00:00 0                          [heap]
Size:                132 kB
Rss:                 100 kB
7f0000000000-7f0000800000 rw-p 00000000 00:00 0
Size:               8192 kB
KernelPageSize:        4 kB
Rss:                8000 kB
VmFlags: rd wr mr mw me ac
7f0000800000-7f0000c00000 r--p 00000000 fe:00 1234                       /usr/lib/libtorch_cpu.so
Rss:                4096 kB
7f0001000000-7f0001800000 rw-p 00400000 fe:00 1234                       /usr/lib/libtorch_cpu.so
Rss:                8192 kB
7f0002000000-7f0002800000 ---p 00000000 00:00 0
Rss:                   0 kB
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]
Rss:                 132 kB
"""


class FakeSystem:
    """Remembers the calls; refuses those with an advice that it does not know.

    As Linux does, it ends a collapse at a huge page that nobody has touched, and where it has no more of them.
    """

    def __init__(self, *known: int, untouched: tuple[int, ...] = (), num_free: int = 1000) -> None:
        self.known = known
        self.untouched = untouched  # addresses
        self.num_free = num_free
        self.moved: set[int] = set()
        self.calls: list[tuple[int, int, int]] = []

    def __call__(self, address: int, num_bytes: int, advice: int) -> int:
        self.calls.append((address, num_bytes, advice))
        if advice not in self.known:
            return errno.EINVAL
        if advice == MADV_COLLAPSE:
            for page in range(address, address + num_bytes, HUGE_PAGE_BYTES):
                if page in self.untouched:
                    return errno.EINVAL
                if page not in self.moved and len(self.moved) == self.num_free:
                    return errno.ENOMEM
                self.moved.add(page)
        return 0


class TestMappings:
    def test_only_private_memory_of_no_file_is_looked_at(self) -> None:
        assert list(mappings(SMAPS.splitlines(keepends=True))) == [
            Mapping(0x55D0C0000000, 0x55D0C0021000, 100 << 10),
            Mapping(0x7F0000000000, 0x7F0000800000, 8000 << 10),
        ]

    def test_those_of_this_process_are_found(self) -> None:
        if not huge_pages._SMAPS.exists():
            pytest.skip("this system does not show a process's memory")
        block = np.ones(32 << 20, dtype=np.uint8)
        address = block.ctypes.data + block.nbytes // 2  # numpy's advice may have split its first page off
        with huge_pages._SMAPS.open() as lines:
            around = [each for each in mappings(lines) if each.start <= address < each.stop]
        assert len(around) == 1
        assert around[0].resident_bytes >= block.nbytes // 2


class TestCollapse:
    def test_whole_huge_pages_within_a_mapping_are_moved(self) -> None:
        system = FakeSystem(MADV_HUGEPAGE, MADV_COLLAPSE)
        start, stop = 5 * HUGE_PAGE_BYTES - 4096, 9 * HUGE_PAGE_BYTES + 4096
        moved = collapse([Mapping(start, stop, stop - start)], system)
        assert moved == 4 * HUGE_PAGE_BYTES
        span = (5 * HUGE_PAGE_BYTES, 4 * HUGE_PAGE_BYTES)
        assert system.calls == [(*span, MADV_HUGEPAGE), (*span, MADV_COLLAPSE)]

    def test_what_is_mostly_untouched_stays_untouched(self) -> None:
        system = FakeSystem(MADV_HUGEPAGE, MADV_COLLAPSE)
        sparse = Mapping(0, 10 * HUGE_PAGE_BYTES, 8 * HUGE_PAGE_BYTES)
        small = Mapping(4096, 2 * HUGE_PAGE_BYTES - 4096, 2 * HUGE_PAGE_BYTES - 8192)
        assert collapse([sparse, small], system) == 0
        assert not system.calls

    def test_a_kernel_that_cannot_move_it_now_is_asked_to_in_time(self) -> None:
        system = FakeSystem(MADV_HUGEPAGE)
        assert collapse([Mapping(0, 2 * HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES)], system) == 0
        assert (0, 2 * HUGE_PAGE_BYTES, MADV_HUGEPAGE) in system.calls

    def test_a_huge_page_that_nobody_has_touched_does_not_keep_those_behind_it(self) -> None:
        hole = 7 * HUGE_PAGE_BYTES
        system = FakeSystem(MADV_HUGEPAGE, MADV_COLLAPSE, untouched=(hole,))
        filled = Mapping(0, 20 * HUGE_PAGE_BYTES, 19 * HUGE_PAGE_BYTES)
        assert collapse([filled], system) == 19 * HUGE_PAGE_BYTES
        assert system.moved == set(range(0, 20 * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES)) - {hole}

    def test_a_system_without_any_left_is_not_asked_for_each(self) -> None:
        system = FakeSystem(MADV_HUGEPAGE, MADV_COLLAPSE, untouched=(0,), num_free=3)
        filled = Mapping(0, 20 * HUGE_PAGE_BYTES, 19 * HUGE_PAGE_BYTES)
        assert collapse([filled], system) == 3 * HUGE_PAGE_BYTES
        assert len(system.calls) == 1 + 1 + 5

    def test_linux_leaves_a_hole_and_all_numbers_as_they_are(self) -> None:
        """The real system, in memory with a hole."""
        madvise = huge_pages.find_madvise()
        if madvise is None or not huge_pages._allowed():
            pytest.skip("this system has no huge pages")
        num, hole = 12, 5
        memory = mmap.mmap(
            -1,
            (num + 1) * HUGE_PAGE_BYTES,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
        block = np.frombuffer(memory, dtype=np.uint8)
        first = -block.ctypes.data % HUGE_PAGE_BYTES
        madvise(block.ctypes.data, len(block), MADV_NOHUGEPAGE)
        for page in range(num):
            if page != hole:
                block[first + page * HUGE_PAGE_BYTES :][:HUGE_PAGE_BYTES] = page
        start = block.ctypes.data + first
        moved = collapse([Mapping(start, start + num * HUGE_PAGE_BYTES, num * HUGE_PAGE_BYTES)], madvise)
        if not moved:
            pytest.skip("this kernel moves nothing at once")
        assert moved <= (num - 1) * HUGE_PAGE_BYTES  # fewer, if memory is short
        assert [int(block[first + page * HUGE_PAGE_BYTES]) for page in range(num)] == [
            0 if page == hole else page for page in range(num)
        ]


class TestThisProcess:
    def test_what_it_moves_is_as_it_was(self) -> None:
        block = np.arange(4 << 20, dtype=np.uint32)
        address = block.ctypes.data
        moved = huge_pages.collapse_resident_memory()
        assert block.ctypes.data == address
        assert np.array_equal(block, np.arange(4 << 20, dtype=np.uint32))
        if not moved:
            pytest.skip("this system has no huge pages to move to")
        assert moved % HUGE_PAGE_BYTES == 0

    def test_an_owner_who_wants_none_gets_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        setting = tmp_path / "enabled"
        setting.write_text("always madvise [never]\n")
        monkeypatch.setattr(huge_pages, "_SETTING", setting)
        monkeypatch.setattr(huge_pages, "find_madvise", lambda: FakeSystem(MADV_HUGEPAGE, MADV_COLLAPSE))
        assert huge_pages.collapse_resident_memory() == 0

    def test_a_system_that_does_not_show_its_memory_is_left_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        setting = tmp_path / "enabled"
        setting.write_text("always [madvise] never\n")
        monkeypatch.setattr(huge_pages, "_SETTING", setting)
        system = FakeSystem(MADV_HUGEPAGE, MADV_COLLAPSE)
        monkeypatch.setattr(huge_pages, "find_madvise", lambda: system)
        for smaps in (tmp_path / "missing", tmp_path):  # the second one is there, and cannot be read
            monkeypatch.setattr(huge_pages, "_SMAPS", smaps)
            assert huge_pages.collapse_resident_memory() == 0
        assert not system.calls
