"""Two page-locked buffers take turns, and none is written before its copy has ended; on the CPU, which copies, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.model_runner.weights.dummy import DummyStore
from engine.model_runner.weights.pinned_staging import PinnedStaging, PlainMemory, staging_for
from engine.model_runner.weights.reader import Slice, WeightReader

CPU = torch.device("cpu")


class Device:
    """Writes down what is asked of a GPU."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.locked: set[int] = set()
        self.num_sent = 0

    def pin(self, memory: Tensor) -> Callable[[], None]:
        self.locked.add(memory.data_ptr())
        return lambda: self.locked.discard(memory.data_ptr())

    def record(self) -> Callable[[], None]:
        self.num_sent += 1
        number = self.num_sent
        self.events.append(f"sent {number}")
        return lambda: self.events.append(f"wait {number}")


@pytest.fixture
def device() -> Device:
    return Device()


def staging_of(device: Device, num_bytes: int = 64) -> PinnedStaging:
    return PinnedStaging(num_bytes, pin=device.pin, record=device.record)


def send(staging: PinnedStaging, value: float, num: int = 16) -> tuple[Tensor, int]:
    memory = staging.take((num,), torch.float32)
    memory.fill_(value)
    return staging.send(memory, CPU), memory.data_ptr()


def test_a_buffer_is_written_again_only_after_its_copy(device):
    staging = staging_of(device)
    sent = [send(staging, value) for value in (1.0, 2.0, 3.0, 4.0)]

    assert [tensor[0].item() for tensor, _ in sent] == [1.0, 2.0, 3.0, 4.0]
    addresses = [address for _, address in sent]
    assert addresses[:2] == addresses[2:] and len(set(addresses)) == 2
    assert device.events == ["sent 1", "sent 2", "wait 1", "sent 3", "wait 2", "sent 4"]
    assert device.locked == set(addresses)


def test_what_is_larger_than_a_buffer_goes_the_ordinary_way(device):
    staging = staging_of(device)
    first, _ = send(staging, 1.0)
    large, _ = send(staging, 2.0, num=17)
    assert device.events == ["sent 1"] and len(device.locked) == 1
    assert (float(first.sum()), float(large.sum())) == (16.0, 34.0)
    empty = staging.take((0, 3), torch.float32)
    assert staging.send(empty, CPU).shape == (0, 3)


@pytest.mark.parametrize("how", ["close", "forget"])
def test_memory_is_unlocked_before_it_is_freed(device, how):
    staging: Any = staging_of(device)
    send(staging, 1.0)
    send(staging, 2.0)
    if how == "close":
        staging.close()
        assert device.events[-2:] == ["wait 1", "wait 2"]
        staging.close()
    del staging
    assert not device.locked


def test_a_reader_gives_the_same_tensors_through_it(device):
    through = WeightReader(DummyStore(1), torch.float32, CPU, staging_of(device, 4096))
    plain = WeightReader(DummyStore(1), torch.float32, CPU)
    names, shapes = ["a", "b"], [(4, 6), (2, 6)]
    parts = [Slice(0, 1, 3), Slice(1, 0, 6)]
    for read in (
        lambda reader: reader.tensor("x", (7, 5)),
        lambda reader: reader.stacked(names, shapes),
        lambda reader: reader.stacked(names, shapes, torch.bfloat16, parts),
        lambda reader: reader.tensor("y", ()),
    ):
        assert torch.equal(read(through), read(plain))
    assert device.num_sent == 4
    through.finish()
    assert not device.locked


def test_on_the_cpu_tensors_stay_where_they_were_read():
    staging = staging_for(CPU)
    assert isinstance(staging, PlainMemory)
    memory = staging.take((3,), torch.float32)
    assert staging.send(memory, CPU) is memory
