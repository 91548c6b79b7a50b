"""Large tensors in the host's memory: where they lie, and that they become resident before they are written."""

from __future__ import annotations

import ctypes
import errno
import mmap
import sys

import pytest
import torch
from torch import Tensor

from engine.model_runner.memory.host_memory import MADV_POPULATE_WRITE, PreFaulter, reserve
from engine.model_runner.memory.huge_pages import HUGE_PAGE_BYTES

MIB = 1 << 20


class FakeSystem:
    """Remembers what became resident."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.calls: list[tuple[int, int]] = []

    def __call__(self, address: int, num_bytes: int, advice: int) -> int:
        assert advice == MADV_POPULATE_WRITE
        self.calls.append((address, num_bytes))
        return self.error

    def covers(self, tensor: Tensor, share: float = 1.0) -> bool:
        """Whether that much of the tensor, from its beginning, is in the calls."""
        at, end = tensor.data_ptr(), tensor.data_ptr() + int(tensor.nbytes * share)
        for address, num_bytes in sorted(self.calls):
            if address <= at < address + num_bytes:
                at = address + num_bytes
        return at >= end


def tensors() -> list[Tensor]:
    """Of unequal size, one smaller than a huge page."""
    return [reserve((mib * MIB,), torch.uint8) for mib in (12, 7)] + [reserve((5, 1000), torch.float32)]


def num_resident(tensor: Tensor) -> int:
    """Small pages of it that are in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = tensor.data_ptr() + tensor.nbytes - start
    flags = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
    assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(length), flags) == 0, ctypes.get_errno()
    return sum(flag & 1 for flag in flags)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9, 1.0])
def test_the_beginnings_of_all_tensors_become_resident_and_little_else(share):
    system, all_of_them = FakeSystem(), tensors()
    populator = PreFaulter(all_of_them, system)

    while populator.fault_in_some(share):
        pass

    assert all(system.covers(tensor, share) for tensor in all_of_them)
    most = sum(share * tensor.nbytes + HUGE_PAGE_BYTES + 2 * mmap.PAGESIZE for tensor in all_of_them)
    assert sum(num_bytes for _, num_bytes in system.calls) <= (most if share else 0)
    assert not populator.fault_in_some(share), "nothing is done twice"


def test_a_larger_share_goes_on_where_the_smaller_one_ended():
    system, all_of_them = FakeSystem(), tensors()
    populator = PreFaulter(all_of_them, system)
    while populator.fault_in_some(0.3):
        pass
    while populator.fault_in_some(1.0):
        pass

    assert len(set(system.calls)) == len(system.calls)
    assert all(map(system.covers, all_of_them))


def test_a_system_that_cannot_is_asked_once():
    system = FakeSystem(errno.EINVAL)
    populator = PreFaulter(tensors(), system)

    assert [populator.fault_in_some(1.0) for _ in range(3)] == [False] * 3
    assert len(system.calls) == 1


def can_populate() -> bool:
    """Asks the system by way of Python's own wrapper."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mmap.mmap(-1, mmap.PAGESIZE).madvise(MADV_POPULATE_WRITE)
    except OSError:
        return False
    return True


@pytest.mark.skipif(not can_populate(), reason="this system has no MADV_POPULATE_WRITE")
def test_really_resident_and_what_was_written_stays():
    tensor = reserve((12 * MIB,), torch.uint8)
    tensor[: 3 * MIB] = 7
    populator = PreFaulter([tensor])

    while populator.fault_in_some(1.0):
        pass

    assert num_resident(tensor) >= tensor.nbytes // mmap.PAGESIZE
    assert int(tensor[: 3 * MIB].min()) == int(tensor[: 3 * MIB].max()) == 7
