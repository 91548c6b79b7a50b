"""`PageWriter` and `PageTarget`: the two sides of a transfer library, for the pages of one rank.

Each is used by one thread: on rank 0 that of the link, on the others that of the rank's `TransferWorker`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int32]


class PoolMemory(Protocol):
    """The KV pool of a rank as the model runner shows it: `PageMemory`.

    Attributes:
        regions: (address, bytes of a page, pages) of each tensor.
        tensors: (dtype, bytes of a page) of each.
        device_id: number of the GPU; None on the CPU.
    """

    @property
    def regions(self) -> Sequence[tuple[int, int, int]]: ...

    @property
    def tensors(self) -> tuple[tuple[str, int], ...]: ...

    @property
    def device_id(self) -> int | None: ...

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, over all tensors."""
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


class Work(Protocol):
    """Work that was begun: pages that are being written, or a peer that is being connected to."""

    def is_done(self) -> bool:
        """Whether it is complete. Call it again and again: some backends make progress in it only.

        Raises:
            TransferError: it will not be. Nothing of it reaches the other engine any more.
        """
        ...


class Done:
    """`Work` that is complete."""

    def is_done(self) -> bool:
        return True


class PageWriter(Protocol):
    """Prefill side: writes pages of its pool into those of decode engines."""

    def add_peer(self, peer: str, target: bytes) -> None:
        """The same rank of a decode engine with this name has come; again, if it has been restarted.

        Args:
            target: what its `PageTarget` says of itself.

        Raises:
            TransferError: it cannot be reached.
        """
        ...

    def drop_peer(self, peer: str) -> None:
        """It is gone."""
        ...

    def write(self, peer: str, sources: Pages, targets: Pages) -> Work:
        """Begin to write `sources` into the peer's pages `targets`, [n] each.

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
        polls: whether `progress` must be called often while claims are open.
    """

    polls: bool

    def target(self) -> bytes:
        """Description of this target for a `PageWriter`."""
        ...

    def progress(self) -> None:
        """Do what the backend must do on this side."""
        ...

    def close(self) -> None:
        """Give up."""
        ...
