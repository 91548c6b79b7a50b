"""KV memory as it is reserved; what is written and read there is for the tests of attention and of the whole runner."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch

from engine.model_runner.memory import host_memory
from engine.model_runner.memory.host_memory import MADV_POPULATE_WRITE
from engine.model_runner.memory.huge_pages import HUGE_PAGE_BYTES
from engine.model_runner.memory.kv_pool import KVPool


@pytest.mark.parametrize(("device", "num_zeros"), [("cpu", 0), ("meta", 6)])
def test_memory_of_a_gpu_holds_numbers_from_the_start(monkeypatch, device, num_zeros):
    """A kernel that loads whole pages gives what nobody wrote the weight 0, and 0 times NaN is NaN.

    A device without data stands for the GPU, so what is seen is which memory was asked for.
    """
    honest, made = torch.zeros, []

    def zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
        made.append(args)
        return honest(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", zeros)
    pool = KVPool(
        num_layers=3,
        num_pages=5,
        page_size=4,
        num_kv_heads=2,
        head_dim=8,
        dtype=torch.float32,
        device=torch.device(device),
    )
    assert len(made) == num_zeros, "keys and values of each layer"
    assert pool.page_bytes == 3 * 2 * 4 * 2 * 8 * 4
    assert pool.num_bytes == 6 * pool.page_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("used_pages", "ahead_pages"), [(0, 0), (3, 10), (200, 100), (1000, 5), (7, 10**6)])
def test_pages_become_resident_as_far_as_asked_for_and_little_further(
    monkeypatch, dtype, used_pages, ahead_pages
):
    populated: list[tuple[int, int]] = []

    def madvise(address: int, num_bytes: int, advice: int) -> int:
        if advice == MADV_POPULATE_WRITE:
            populated.append((address, address + num_bytes))
        return 0

    monkeypatch.setattr(host_memory, "find_madvise", lambda: madvise)
    pool = KVPool(
        num_layers=2,
        num_pages=1000,
        page_size=16,
        num_kv_heads=4,
        head_dim=64,
        dtype=dtype,
        device=torch.device("cpu"),
    )

    while pool.fault_in_some(used_pages, ahead_pages * pool.page_bytes):
        pass

    last = min(used_pages + ahead_pages, 1000)
    resident = {
        page for begin, end in populated for page in range(begin // mmap.PAGESIZE, -(-end // mmap.PAGESIZE))
    }
    for view in (*pool.page_views, *pool.scale_views):
        start, page = view.data_ptr(), view[0].nbytes
        asked = range(start // mmap.PAGESIZE, -(-(start + (last + 1) * page) // mmap.PAGESIZE))
        assert resident.issuperset(asked), "the last page of those is resident"
        # A neighbor's first small page may be this one's last.
        reached = max(
            min(end, start + view.nbytes)
            for begin, end in populated
            if start < end and begin <= start + view.nbytes - mmap.PAGESIZE
        )
        assert reached <= start + (last + 1) * page + HUGE_PAGE_BYTES + mmap.PAGESIZE


def test_a_gpu_has_nothing_to_make_resident():
    pool = KVPool(
        num_layers=1,
        num_pages=5,
        page_size=4,
        num_kv_heads=2,
        head_dim=8,
        dtype=torch.float32,
        device=torch.device("meta"),
    )
    assert not pool.fault_in_some(5, 1 << 40)
