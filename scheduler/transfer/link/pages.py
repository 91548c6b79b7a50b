"""`PageSender` and `PageReceiver`: the pages of all ranks, for the two links; each is used by the link's thread alone.

Two classes each. *Direct*: a transfer library of each rank writes into the memory of its counterpart. *Local*: all
pages travel through the connection of the two rank 0s, and the decode engine stores them itself (`local_pages.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np

from ....runtime.kv_backends.base import Pages, PageTarget, PageWriter, TransferError, Work
from ....runtime.transport.kv_transfer import WritePages
from ....runtime.transport.rank_transfer import PROGRESS_S, AddPeer, DropPeer, MakeProgress, WriteOwnPages
from .ranks import Frames, Ranks

DRAIN_S: Final = 1.0
"""Pages that a process had handed to its kernel may arrive for so long after its end, or after the write has failed."""

SendFrames = Callable[[Frames], None]


class Sending(Work, Protocol):
    """Pages of all ranks that are being written. `Work` that fails is over on all ranks, too."""

    def stop(self) -> bool:
        """The peer is lost: end now, with an error, if that is possible; else it goes on until it ends by itself.

        Returns:
            Whether nothing of it reaches the other engine any more.
        """
        ...


class PageSender(Protocol):
    """Prefill side.

    Attributes:
        drain_s: what a failed write has begun may arrive for so long.
    """

    drain_s: float

    def add_peer(self, peer: str, targets: Sequence[bytes]) -> Work:
        """A decode engine with this name has come; again, if it has been restarted.

        Args:
            targets: `PageReceiver.targets` of it.

        Raises:
            TransferError: it cannot be reached.
        """
        ...

    def drop_peer(self, peer: str) -> None:
        """It is gone, and all that was being written to it has ended."""
        ...

    def write(self, command: WritePages, send: SendFrames) -> Sending:
        """Begin to write pages.

        Args:
            send: sends frames to the peer, in order.
        """
        ...

    def taken(self, peer: str, number: int) -> None:
        """The peer has taken the `PageData` with this number."""
        ...

    def close(self) -> None:
        """Give up."""
        ...


class PageReceiver(Protocol):
    """Decode side.

    Attributes:
        is_passive: whether this engine stores the pages itself, so that it knows when nothing arrives any more.
        polls: whether `progress` must be called often while claims are open.
    """

    is_passive: bool
    polls: bool

    def targets(self) -> tuple[bytes, ...]:
        """Facts that each rank of the prefill engine needs to write to its counterpart here."""
        ...

    def store(self, rank: int, pages: Pages, frames: Frames) -> Work:
        """Begin to write pages that came through the connection into the pool of a rank.

        Raises:
            ValueError: they do not fit.
        """
        ...

    def progress(self) -> None:
        """Do what the backend must do on this side."""
        ...

    def close(self) -> None:
        """Give up."""
        ...


_PROGRESS_AGAIN_S: Final = PROGRESS_S / 4


class AllOf:
    """`Work` of several ranks. It has ended when it has on all of them, and has failed if it has on one."""

    def __init__(self, parts: Sequence[Work], error: str = "") -> None:
        """`error`: of a part that has failed already."""
        self._open = list(parts)
        self._error = error

    def is_done(self) -> bool:
        left = []
        for part in self._open:
            try:
                if not part.is_done():
                    left.append(part)
            except TransferError as error:
                self._error = self._error or str(error)
        self._open = left
        if left:
            return False  # pages of a rank may still arrive, also if those of another one have failed
        if self._error:
            raise TransferError(self._error)
        return True

    def stop(self) -> bool:
        """A library cannot take back what it has begun."""
        return not self._open


class DirectSender:
    """Rank i of the prefill engine writes its part of the pages to rank i of the decode engine."""

    drain_s = DRAIN_S

    def __init__(self, writer: PageWriter, ranks: Ranks) -> None:
        """`writer`: of rank 0."""
        self._writer = writer
        self._ranks = ranks

    def add_peer(self, peer: str, targets: Sequence[bytes]) -> AllOf:
        if len(targets) != 1 + len(self._ranks):
            raise TransferError(f"it names {len(targets)} ranks, but there are {1 + len(self._ranks)}")
        self._writer.add_peer(peer, targets[0])
        others = enumerate(targets[1:], 1)
        return AllOf([self._ranks.order(rank, AddPeer(0, peer, target)) for rank, target in others])

    def drop_peer(self, peer: str) -> None:
        self._writer.drop_peer(peer)
        self._ranks.send(DropPeer(peer))

    def write(self, command: WritePages, send: SendFrames) -> AllOf:
        """Rank 0 has settled the step that computed the pages; the others wait for it."""
        own = WriteOwnPages(0, command.peer, command.sources, command.targets, command.step_id)
        parts: list[Work] = [self._ranks.order(rank, own) for rank in range(1, 1 + len(self._ranks))]
        sources, targets = (
            np.frombuffer(each, dtype=np.int32) for each in (command.sources, command.targets)
        )
        try:
            parts.append(self._writer.write(command.peer, sources, targets))
        except TransferError as error:
            return AllOf(parts, str(error))
        return AllOf(parts)

    def taken(self, peer: str, number: int) -> None:
        pass

    def close(self) -> None:
        self._writer.close()
        self._ranks.close()


class DirectReceiver:
    """See `PageReceiver`."""

    is_passive = False

    def __init__(self, target: PageTarget, ranks: Ranks) -> None:
        """`target`: of rank 0."""
        self._target = target
        self._ranks = ranks
        self._ordered_s = 0.0
        self.polls = target.polls

    def targets(self) -> tuple[bytes, ...]:
        return (self._target.target(), *(worker.target for worker in self._ranks.workers))

    def store(self, rank: int, pages: Pages, frames: Frames) -> Work:
        raise ValueError("the backend writes pages itself")

    def progress(self) -> None:
        self._target.progress()
        now_s = time.monotonic()
        if now_s - self._ordered_s > _PROGRESS_AGAIN_S:
            self._ordered_s = now_s
            self._ranks.send(MakeProgress())

    def close(self) -> None:
        self._target.close()
        self._ranks.close()
