"""Memory of weights: aligned, separate, and shared pieces for small ones."""

from __future__ import annotations

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
