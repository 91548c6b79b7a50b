"""`BodyBudget`: a bound on the bytes of all request bodies that are being received.

`--max-body-mb` bounds one body; a thousand clients that each send all but the last byte of a body would hold a thousand
times as much for `--body-timeout`. Small bodies are not counted: the number of connections bounds them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from ....runtime.errors import QueueFullError

MAX_BYTES: Final = 1 << 30
SMALL_BYTES: Final = 64 << 10
_RETRY_AFTER_S: Final = 5


class BodyBudget:
    """The budget of one server.

    Attributes:
        num_bytes: reserved now, by large bodies.
        max_bytes: that can be reserved.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.num_bytes = 0
        self.max_bytes = max_bytes

    @contextlib.contextmanager
    def reserve(self) -> Iterator[BodyReservation]:
        """The reservation of one body, for as long as its bytes are kept."""
        reservation = BodyReservation(self)
        try:
            yield reservation
        finally:
            self.num_bytes -= reservation.num_bytes

    def grow(self, reservation: BodyReservation, size: int) -> None:
        more = size - reservation.num_bytes
        if size <= SMALL_BYTES or more <= 0:
            return
        others = self.num_bytes - reservation.num_bytes
        if others and others + size > self.max_bytes:
            raise QueueFullError(
                f"the bodies of other requests take {others} bytes while they come in, and all together may take "
                f"{self.max_bytes}; retry later",
                _RETRY_AFTER_S,
            )
        self.num_bytes += more
        reservation.num_bytes = size


class BodyReservation:
    """The bytes of the budget that one body takes.

    Attributes:
        num_bytes: 0 while the body is small.
    """

    __slots__ = ("_budget", "num_bytes")

    def __init__(self, budget: BodyBudget) -> None:
        self.num_bytes = 0
        self._budget = budget

    def grow_to(self, size: int) -> None:
        """Reserve for a body that has `size` bytes by now.

        Raises:
            QueueFullError: other bodies take the budget.
        """
        self._budget.grow(self, size)
