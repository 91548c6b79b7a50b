"""`Lpm`: longest prefix match first, so that a cached prefix is used before it is evicted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ..req import Req
from ..waiting_queue import WaitingQueue
from .base import MAX_OVERTAKEN, PrefixLenOf

MAX_SORTED: Final = 128
"""Above so many waiting requests, looking them all up costs more than a good order gains: first come, first served."""


class Lpm:
    """Most cached pages first; equals in the order of arrival; who was overtaken too often before everybody.

    SGLang's policy of the same name has no ageing: there a request without a cached prefix waits for as long as
    requests with one keep coming.
    """

    def __init__(self, prefix_len_of: PrefixLenOf) -> None:
        self._prefix_len_of = prefix_len_of

    def order(self, waiting: WaitingQueue) -> Iterable[Req]:
        if len(waiting) > MAX_SORTED:
            return waiting
        return sorted(waiting, key=self._key)

    def _key(self, req: Req) -> tuple[bool, int, int]:
        if req.num_overtaken >= MAX_OVERTAKEN:
            return (False, 0, req.seq)
        return (True, -self._prefix_len_of(req), req.seq)
