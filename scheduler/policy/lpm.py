"""`Lpm`: longest prefix match first, so that a cached prefix is used before it is evicted."""

from __future__ import annotations

from collections.abc import Iterable

from ..req import Req
from ..waiting_queue import WaitingQueue
from .base import MAX_OVERTAKEN, MAX_SORTED, PolicyParts, SchedulePolicy


class Lpm(SchedulePolicy):
    """Most cached pages first; equals in the order of arrival; who was overtaken too often before everybody.

    SGLang's policy of the same name has no ageing: there a request without a cached prefix waits for as long as
    requests with one keep coming.
    """

    name = "lpm"

    def __init__(self, parts: PolicyParts) -> None:
        self._match = parts.match

    def order(self, waiting: WaitingQueue, now_s: float) -> Iterable[Req]:
        if len(waiting) > MAX_SORTED:
            return waiting
        return sorted(waiting, key=self._key)

    def _key(self, req: Req) -> tuple[bool, int, int]:
        if req.num_overtaken >= MAX_OVERTAKEN:
            return (False, 0, req.seq)
        return (True, -self._match(req).num_pages, req.seq)
