"""On a GPU one kernel gathers cos and sin; the numbers, and what is made of them, are those of two tables."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.model_runner.kernels.triton import rotary_store
from engine.model_runner.layers.rotary import RotaryEmbedding
from engine.model_runner.ops.rotation import LayerKV, RotaryStore
from tests.conftest import HAS_NVIDIA_DRIVER
from tests.triton_interpreter import repair_interpreter

repair_interpreter()

DEVICE = torch.device("cuda" if HAS_NVIDIA_DRIVER else "cpu")
POSITIONS = torch.tensor([0, 17, 3, 63], device=DEVICE)


@pytest.fixture
def taken() -> list[tuple[int, ...]]:
    """The shape of each table that rows were taken of."""
    return []


@pytest.fixture
def context(taken: list[tuple[int, ...]]) -> Any:
    def take_rows(table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        taken.append(tuple(table.shape))
        return table.index_select(0, indices)

    ops = SimpleNamespace(take_rows=take_rows)
    spec = SimpleNamespace(vision=None)
    return SimpleNamespace(max_model_len=64, device=DEVICE, dtype=torch.float32, ops=ops, spec=spec)


def test_cos_and_sin_come_with_one_kernel(context, taken):
    frequencies = torch.tensor([1.0, 0.5, 0.1, 0.01, 3.0, 0.2, 0.3, 0.7])
    two = RotaryEmbedding(frequencies, 1.5, context, in_one=False).at(POSITIONS)
    one = RotaryEmbedding(frequencies, 1.5, context, in_one=True).at(POSITIONS)

    assert taken == [(64, 16), (64, 16), (64, 32)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(one, two, strict=True))
    assert all(each.stride() == (32, 1) and each.data_ptr() % 16 == 0 for each in one)


def test_the_rotation_takes_them_as_they_lie(context):
    torch.manual_seed(0)
    frequencies = torch.rand(8)
    slots = torch.tensor([2, 0, 5, 3], device=DEVICE)
    results = []
    for in_one in (False, True):
        cos, sin = RotaryEmbedding(frequencies, 1.0, context, in_one=in_one).at(POSITIONS)
        qkv = torch.arange(4 * 6 * 16, dtype=torch.float32, device=DEVICE).view(4, 6, 16) / 100
        kv = LayerKV(*(torch.zeros(8, 2, 16, device=DEVICE) for _ in range(2)))
        q = rotary_store.rotate_and_store(qkv, None, RotaryStore(cos, sin, kv, slots))
        results.append((q, kv.k, kv.v))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
