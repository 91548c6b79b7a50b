"""`--transfer-backend local`: pages travel through the connection between the engines. It needs no library.

The decode engine writes them into its pool itself, so that nothing can arrive in pages that it has taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .base import Pages, PoolMemory, SendFrames

_MESSAGE_BYTES: Final = 8 << 20
"""About the size of a message: pages of one are stored while the next one travels."""


class _Done:
    def is_done(self) -> bool:
        return True


class LocalWriter:
    """See `PageWriter`."""

    def __init__(self, memory: PoolMemory) -> None:
        self._memory = memory
        self._pages_per_message = max(1, _MESSAGE_BYTES // memory.page_bytes)

    def add_peer(self, peer: str, target: bytes) -> None:
        pass

    def drop_peer(self, peer: str) -> None:
        pass

    def write(self, peer: str, sources: Pages, targets: Pages, header: bytes, send: SendFrames) -> _Done:
        step = self._pages_per_message
        for begin in range(0, len(sources), step):
            pages = targets[begin : begin + step]
            send([header, pages.tobytes(), *self._memory.read(sources[begin : begin + step])])
        return _Done()

    def close(self) -> None:
        pass


class LocalTarget:
    """See `PageTarget`."""

    is_passive = True
    polls = False

    def __init__(self, memory: PoolMemory) -> None:
        self._memory = memory

    def target(self) -> bytes:
        return b""

    def store(self, pages: Pages, frames: Sequence[bytes | memoryview]) -> None:
        self._memory.write(pages, frames)

    def progress(self) -> None:
        pass

    def close(self) -> None:
        pass
