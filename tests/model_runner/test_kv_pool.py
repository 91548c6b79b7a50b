"""KV memory as it is reserved; what is written and read there is for the tests of attention and of the whole runner."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.model_runner.kv_pool import KVPool


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
