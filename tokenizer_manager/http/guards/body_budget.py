"""`BodyRoom`: how much of request bodies may be held while they come in, of all clients together.

`--max-body-mb` bounds one body; a thousand clients that send all but the last byte of theirs would hold a thousand
times as much for `--body-timeout`. What is small always has room: connections bound how much that can be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from ...admission.queue_limiter import QueueFullError

MAX_BYTES: Final = 1 << 30
SMALL_BYTES: Final = 64 << 10
_RETRY_AFTER_S: Final = 5


class BodyRoom:
    """One server's.

    Attributes:
        num_bytes: held now, of large bodies.
        max_bytes: that may be.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.num_bytes = 0
        self.max_bytes = max_bytes

    @contextlib.contextmanager
    def hold(self) -> Iterator[Share]:
        """Room for one body, for as long as it is held as bytes."""
        share = Share(self)
        try:
            yield share
        finally:
            self.num_bytes -= share.num_bytes

    def take(self, share: Share, size: int) -> None:
        """See `Share.grow_to`."""
        more = size - share.num_bytes
        if size <= SMALL_BYTES or more <= 0:
            return
        others = self.num_bytes - share.num_bytes
        if others and others + size > self.max_bytes:
            raise QueueFullError(
                f"the bodies of other requests take {others} bytes while they come in, and all together may take "
                f"{self.max_bytes}; retry later",
                _RETRY_AFTER_S,
            )
        self.num_bytes += more
        share.num_bytes = size


class Share:
    """What one body takes of the room.

    Attributes:
        num_bytes: 0 while it is small.
    """

    __slots__ = ("_room", "num_bytes")

    def __init__(self, room: BodyRoom) -> None:
        self.num_bytes = 0
        self._room = room

    def grow_to(self, size: int) -> None:
        """The body has so many bytes by now.

        Raises:
            QueueFullError: others take the room.
        """
        self._room.take(self, size)
