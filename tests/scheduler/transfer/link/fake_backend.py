"""`FakeWriter` and `FakeTarget`: a transfer library in one process, whose writes end when a test wants it."""

from __future__ import annotations

import secrets
import threading
import time
from typing import Final

from engine.model_runner.memory.page_memory import PageMemory
from engine.runtime.kv_backends.base import Pages, TransferError

_MEMORIES: Final[dict[bytes, PageMemory]] = {}
_WAIT_S: Final = 30.0


class FakeTarget:
    """See `PageTarget`. Attributes: num_progress: calls of `progress`."""

    polls = True

    def __init__(self, memory: PageMemory) -> None:
        self._name = secrets.token_bytes(8)
        self.num_progress = 0
        _MEMORIES[self._name] = memory

    def target(self) -> bytes:
        return self._name

    def progress(self) -> None:
        self.num_progress += 1

    def close(self) -> None:
        _MEMORIES.pop(self._name, None)


class FakeWrite:
    """Pages that are copied when the test says so."""

    def __init__(self, source: PageMemory, target: PageMemory, sources: Pages, targets: Pages) -> None:
        self._source, self._target = source, target
        self._sources, self._targets = sources.copy(), targets.copy()
        self._ends = threading.Event()
        self._error = ""

    def end(self, error: str = "") -> None:
        self._error = error
        self._ends.set()

    def is_done(self) -> bool:
        if not self._ends.is_set():
            return False
        if self._error:
            raise TransferError(self._error)
        self._target.write(self._targets, self._source.read(self._sources))
        return True


class FakeWriter:
    """See `PageWriter`.

    Attributes:
        refusal: why no peer can be reached; "": all can.
        begun: the writes.
    """

    def __init__(self, memory: PageMemory) -> None:
        self._memory = memory
        self._peers: dict[str, PageMemory] = {}
        self.refusal = ""
        self.begun: list[FakeWrite] = []

    def add_peer(self, peer: str, target: bytes) -> None:
        if self.refusal:
            raise TransferError(self.refusal)
        self._peers[peer] = _MEMORIES[target]

    def drop_peer(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def write(self, peer: str, sources: Pages, targets: Pages) -> FakeWrite:
        if peer not in self._peers:
            raise TransferError(f"{peer} is not known")
        self.begun.append(FakeWrite(self._memory, self._peers[peer], sources, targets))
        return self.begun[-1]

    def close(self) -> None:
        pass

    def next_write(self) -> FakeWrite:
        """Wait for a write, and take it."""
        deadline_s = time.monotonic() + _WAIT_S
        while not self.begun:
            assert time.monotonic() < deadline_s, "no write has begun"
            time.sleep(0.001)
        return self.begun.pop(0)
