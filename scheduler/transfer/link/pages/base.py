"""`PageSender` and `PageReceiver`: the pages of all ranks, for the two links; each is used by the link's thread alone.

Two classes each. *Direct*: a transfer library of each rank writes into the memory of its counterpart. *Local*: all
pages travel through the connection of the two rank 0s, and the decode engine stores them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from .....runtime.kv_backends.base import Pages, Work
from .....runtime.transport.kv_transfer import WritePages

DRAIN_S: Final = 1.0
"""Pages that a process had handed to its kernel may arrive for so long after its end, or after the write has failed."""

Frames = Sequence[bytes | memoryview]
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
        """What the prefill engine's ranks must know of those of this engine."""
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
