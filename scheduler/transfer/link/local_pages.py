"""`--transfer-backend local`: pages of all ranks travel through the connection of the two rank 0s. It needs no library.

    prefill rank i ──► rank 0 ──► decode rank 0 ──► rank i     and back: the pages are taken

The decode engine stores the pages itself, so it knows when nothing can arrive any more in pages that it takes back. At
most `WINDOW` messages to an engine are between the pools: with those that it has not taken, nothing is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from ....runtime.kv_backends.base import Done, Pages, PoolMemory, TransferError, Work
from ....runtime.transport.kv_transfer import PageData, WritePages
from ....runtime.transport.rank_transfer import ReadOwnPages, StoreOwnPages
from .pages import SendFrames
from .ranks import Frames, Ordered, Ranks

MESSAGE_BYTES: Final = 8 << 20
"""About the size of a message: pages of one are stored while the next one travels."""
WINDOW: Final = 4


class _Piece(NamedTuple):
    """A message: the part of a rank of some pages."""

    rank: int
    sources: Pages
    targets: Pages


class _Sending:
    """Pages that are being sent; see `Sending`."""

    def __init__(self, sender: LocalSender, command: WritePages, send: SendFrames) -> None:
        self._sender = sender
        self._command = command
        self._send = send
        self._pieces = deque(sender.pieces_of(command))
        self._reading: deque[tuple[_Piece, int, Ordered]] = deque()
        self._sent: set[int] = set()
        self._error = ""

    def is_done(self) -> bool:
        """Reads and sends what the window allows."""
        try:
            if not self._error:
                self._advance()
        except TransferError as error:
            self._end(str(error))
        if self._error:
            raise TransferError(self._error)
        return not (self._pieces or self._reading or self._sent)

    def stop(self) -> bool:
        """The decode engine drops pages of claims that it has given up."""
        self._end(f"{self._command.peer} is lost")
        return True

    def _end(self, error: str) -> None:
        self._error = self._error or error
        for _, number, _ in self._reading:  # they are not sent
            self._sender.taken(self._command.peer, number)
        self._reading.clear()

    def taken(self, number: int) -> None:
        """The peer has taken a message."""
        self._sent.discard(number)

    def _advance(self) -> None:
        while self._pieces and (number := self._sender.begin(self._command.peer, self)):
            piece = self._pieces.popleft()
            if piece.rank == 0:
                self._pass_on(piece, number, self._sender.memory.read(piece.sources))
            else:
                order = ReadOwnPages(0, piece.sources.tobytes(), self._command.step_id)
                self._reading.append((piece, number, self._sender.ranks.order(piece.rank, order)))
        while self._reading and self._reading[0][2].is_done():
            piece, number, read = self._reading.popleft()
            self._pass_on(piece, number, read.frames)

    def _pass_on(self, piece: _Piece, number: int, frames: Frames) -> None:
        head = PageData(self._command.bootstrap_room, self._command.attempt, piece.rank, number)
        self._sent.add(number)
        self._send([msgspec.msgpack.encode(head), piece.targets.tobytes(), *frames])


class LocalSender:
    """See `PageSender`.

    Attributes:
        memory: of rank 0.
        ranks: the others.
    """

    drain_s = 0.0  # pages travel before the message that a write has failed

    def __init__(self, memory: PoolMemory, ranks: Ranks) -> None:
        self.memory = memory
        self.ranks = ranks
        self._pages_per_message = max(1, MESSAGE_BYTES // memory.page_bytes)
        self._windows: dict[str, dict[int, _Sending]] = {}  # peer -> messages that it has not taken
        self._last_number = 0

    def add_peer(self, peer: str, targets: Sequence[bytes]) -> Done:
        self._windows[peer] = {}
        return Done()

    def drop_peer(self, peer: str) -> None:
        self._windows.pop(peer, None)

    def write(self, command: WritePages, send: SendFrames) -> _Sending:
        return _Sending(self, command, send)

    def taken(self, peer: str, number: int) -> None:
        sending = self._windows.get(peer, {}).pop(number, None)
        if sending is not None:
            sending.taken(number)

    def close(self) -> None:
        self.ranks.close()

    # ------------------------------------------------------------ for `_Sending`

    def begin(self, peer: str, sending: _Sending) -> int:
        """The number of a new message; 0: the peer has not taken enough of the earlier ones."""
        window = self._windows.get(peer)
        if window is None or len(window) >= WINDOW:
            return 0
        self._last_number += 1
        window[self._last_number] = sending
        return self._last_number

    def pieces_of(self, command: WritePages) -> list[_Piece]:
        """The messages that carry these pages of all ranks, which so read and store at the same time."""
        sources, targets = (
            np.frombuffer(each, dtype=np.int32) for each in (command.sources, command.targets)
        )
        step = self._pages_per_message
        return [
            _Piece(rank, sources[begin : begin + step], targets[begin : begin + step])
            for begin in range(0, len(sources), step)
            for rank in range(1 + len(self.ranks))
        ]


class LocalReceiver:
    """See `PageReceiver`."""

    is_passive = True
    polls = False

    def __init__(self, memory: PoolMemory, ranks: Ranks) -> None:
        """`memory`: of rank 0."""
        self._memory = memory
        self._ranks = ranks

    def targets(self) -> tuple[bytes, ...]:
        return (b"",) * (1 + len(self._ranks))

    def store(self, rank: int, pages: Pages, frames: Frames) -> Work:
        if not 0 <= rank <= len(self._ranks):
            raise ValueError(f"there is no rank {rank}")
        if rank:
            return self._ranks.order(rank, StoreOwnPages(0, pages.tobytes()), frames)
        self._memory.write(pages, frames)
        return Done()

    def progress(self) -> None:
        pass

    def close(self) -> None:
        self._ranks.close()
