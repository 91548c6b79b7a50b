"""`PageWriter` and `PageTarget`: the two sides of a transfer backend, each used by the thread of its link alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int32]
SendFrames = Callable[[Sequence[bytes | memoryview]], None]


class PoolMemory(Protocol):
    """The KV pool of an engine as the model runner shows it: `PageMemory`.

    Attributes:
        regions: (address, bytes of a page, pages) of each tensor.
        device_id: number of the GPU; None on the CPU.
    """

    @property
    def regions(self) -> Sequence[tuple[int, int, int]]: ...

    @property
    def device_id(self) -> int | None: ...

    @property
    def page_bytes(self) -> int:
        """Of one page, all tensors."""
        ...

    def read(self, page_ids: Pages) -> list[memoryview]:
        """The bytes of pages, a buffer for each tensor."""
        ...

    def write(self, page_ids: Pages, frames: Sequence[memoryview | bytes]) -> None:
        """Write what `read` returned into other pages.

        Raises:
            ValueError: the frames do not fit.
        """
        ...


class TransferError(Exception):
    """Pages could not be written; the message says why."""


class Write(Protocol):
    """Pages that are being written."""

    def is_done(self) -> bool:
        """Whether all pages are there. Call it again and again: some backends make progress in it only.

        Raises:
            TransferError: they will not come. Nothing of this write reaches the other engine any more.
        """
        ...


class PageWriter(Protocol):
    """Prefill side: writes pages of its pool into those of decode engines."""

    def add_peer(self, peer: str, target: bytes) -> None:
        """A decode engine with this name has come; again, if it has been restarted.

        Args:
            target: what its `PageTarget` says of itself.

        Raises:
            TransferError: it cannot be reached.
        """
        ...

    def drop_peer(self, peer: str) -> None:
        """It is gone."""
        ...

    def write(self, peer: str, sources: Pages, targets: Pages, header: bytes, send: SendFrames) -> Write:
        """Begin to write `sources` into the peer's pages `targets`, [n] each.

        Args:
            header: names the claim, for a backend that sends pages through the connection.
            send: sends frames to the peer, in order.

        Raises:
            TransferError: it cannot begin.
        """
        ...

    def close(self) -> None:
        """Give up."""
        ...


class PageTarget(Protocol):
    """Decode side: lets prefill engines write into its pool.

    Attributes:
        is_passive: whether this engine writes the pages itself, so that nothing arrives for an aborted claim.
        polls: whether `progress` must be called often while claims are open.
    """

    is_passive: bool
    polls: bool

    def target(self) -> bytes:
        """What a `PageWriter` must know of it."""
        ...

    def store(self, pages: Pages, frames: Sequence[bytes | memoryview]) -> None:
        """Write pages that came through the connection.

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
