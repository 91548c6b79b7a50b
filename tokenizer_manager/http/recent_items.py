"""`RecentItems`: items of the last answers, for clients that send `item_reference` instead of an item.

OpenAI's server stores responses unless `store` is false, and libraries rely on it: in the second step of a tool loop
they name the call of the first by its id. Here items are kept for a time, within a number of bytes, in memory.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import msgspec

from .schema.values import Body

KEPT_S: Final = 1800.0
"""How long an item is kept; long enough for a person who confirms each call."""
MAX_KEPT_BYTES: Final = 32 << 20
_OVERHEAD_BYTES: Final = 300  # of an entry


class Item(Protocol):
    """A struct with an id, such as an item of an answer of `/v1/responses`."""

    @property
    def id(self) -> str: ...


class RecentItems:
    """Items by their id and their owner; safe to use from several threads."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        """Keep nothing yet; `clock`: seconds."""
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._items: OrderedDict[tuple[str, str], tuple[float, bytes]] = OrderedDict()
        self._num_bytes = 0

    def keep(self, items: Iterable[Item], owner: str) -> None:
        """Keep the items of an answer; the oldest ones leave where there is no room.

        Args:
            items: complete.
            owner: `Scheduling.owner` of the request; other clients cannot refer to them.
        """
        now_s = self._clock()
        with self._lock:
            for item in items:
                data = msgspec.json.encode(item)
                self._items[owner, item.id] = (now_s, data)
                self._num_bytes += len(data) + _OVERHEAD_BYTES
            while self._items:
                key, (kept_s, data) = next(iter(self._items.items()))
                if self._num_bytes <= self._max_bytes and now_s - kept_s <= KEPT_S:
                    break
                del self._items[key]
                self._num_bytes -= len(data) + _OVERHEAD_BYTES

    def find(self, item_id: str, owner: str) -> Body | None:
        """The item as a client would send it; None if it is not kept (any more)."""
        with self._lock:
            kept_s, data = self._items.get((owner, item_id), (0.0, b""))
        if not data or self._clock() - kept_s > KEPT_S:
            return None
        item: Body = msgspec.json.decode(data)
        return item
