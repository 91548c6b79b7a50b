"""Memory of weights: aligned, separate, and shared pieces for small ones."""

from __future__ import annotations

import itertools

import pytest
import torch

from engine.model_runner.memory import huge_pages as weight_memory
from engine.model_runner.memory.huge_pages import HUGE_PAGE_BYTES, WeightMemory


def test_weights_are_aligned_and_do_not_overlap(monkeypatch):
    monkeypatch.setattr(weight_memory, "_PIECE_BYTES", 4 * HUGE_PAGE_BYTES)
    memory = WeightMemory()
    sizes = [0, 1, 100, 64, 3 << 20, 3 << 20, 5 << 20, 7, 4 << 20]

    taken = [memory.take(size) for size in sizes]
    for number, one in enumerate(taken):
        one.fill_(number)

    for number, (size, one) in enumerate(zip(sizes, taken, strict=True)):
        assert one.dtype == torch.uint8 and one.shape == (size,) and one.data_ptr() % 64 == 0
        assert (one == number).all()
    assert taken[6].data_ptr() % HUGE_PAGE_BYTES == 0  # larger than half a piece: its own
    assert taken[3].untyped_storage().data_ptr() == taken[2].untyped_storage().data_ptr()


@pytest.mark.parametrize(("page_ms", "advice"), [(0.2, [14, 14]), (4.7, [14, 15])])
def test_where_huge_pages_take_longer_than_small_ones_the_weights_get_small_ones(
    monkeypatch, page_ms, advice
):
    """The first page of a piece tells; the others are moved when the model is loaded."""
    times = itertools.count(0.0, page_ms / 1e3)
    calls: list[int] = []

    def madvise(address: int, num_bytes: int, advice: int) -> int:
        calls.append(advice)
        return 0

    monkeypatch.setattr(weight_memory, "find_madvise", lambda: madvise)
    monkeypatch.setattr("engine.model_runner.memory.huge_pages.time.thread_time", lambda: next(times))
    memory = WeightMemory()

    memory.take(40 << 20)
    memory.take(40 << 20)

    assert calls == advice
