"""`MooncakeWriter`: what it takes from a decode engine, with a stub of the library."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.runtime.kv_backends import mooncake
from engine.runtime.kv_backends.base import TransferError

HERE = ((1000, 8, 4), (2000, 4, 4))
"""(address, bytes of a page, pages) of two tensors."""


class StubEngine:
    """Mooncake's `TransferEngine`, which notes what it is to write."""

    def __init__(self) -> None:
        self.written: list[tuple[Any, ...]] = []

    def initialize(self, *_arguments: Any) -> int:
        return 0

    def register_memory(self, address: int, num_bytes: int) -> int:
        return 0

    def unregister_memory(self, address: int) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return 1

    def batch_transfer_sync_write(self, *pieces: Any) -> int:
        self.written.append(pieces)
        return 0


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> StubEngine:
    stub = StubEngine()
    monkeypatch.setattr(mooncake, "_import", lambda: SimpleNamespace(TransferEngine=lambda: stub))
    return stub


def target(*regions: tuple[int, int, int]) -> bytes:
    return msgspec.msgpack.encode(["host:2", regions])


def wait_for(write: Any) -> None:
    write._future.exception(timeout=30.0)
    assert write.is_done()


def test_each_page_is_written_in_each_tensor(engine: StubEngine) -> None:
    memory: Any = SimpleNamespace(regions=HERE)
    writer = mooncake.MooncakeWriter(memory, "host")
    writer.add_peer("decode", target((5000, 8, 9), (6000, 4, 9)))
    wait_for(writer.write("decode", np.array([1, 3], np.int32), np.array([8, 2], np.int32)))
    sources, targets, sizes = [1008, 1024, 2004, 2012], [5064, 5016, 6032, 6008], [8, 8, 4, 4]
    assert engine.written == [("host:2", sources, targets, sizes)]
    writer.close()


@pytest.mark.parametrize("regions", [((5000, 8, 4),), ((5000, 800, 4), (6000, 4, 4)), ()])
def test_another_layout_of_the_memory_is_refused(
    engine: StubEngine, regions: tuple[tuple[int, int, int], ...]
) -> None:
    """Sizes of the other side would be read beyond this pool."""
    memory: Any = SimpleNamespace(regions=HERE)
    writer = mooncake.MooncakeWriter(memory, "host")
    with pytest.raises(TransferError, match="its pool has other tensors"):
        writer.add_peer("decode", target(*regions))
    writer.close()
