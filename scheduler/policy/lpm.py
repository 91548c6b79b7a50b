"""`Lpm`: longest prefix match first, so that a cached prefix is used before it is evicted."""

from __future__ import annotations

from collections.abc import Iterable

from ..requests.req import Req
from ..requests.waiting_queue import WaitingQueue
from .ageing import overtaken_first
from .base import MAX_SORTED, PolicyParts, SchedulePolicy


class Lpm(SchedulePolicy):
    """Most cached pages first; equals in the order of arrival; who was overtaken too often before everybody.

    SGLang's policy of the same name has no ageing: there a request without a cached prefix waits for as long as
    requests with one keep coming.
    """

    name = "lpm"

    def __init__(self, parts: PolicyParts) -> None:
        self._matches = parts.matches

    def order(self, waiting: WaitingQueue, now_s: float) -> Iterable[Req]:
        if len(waiting) > MAX_SORTED:
            return waiting
        reqs = list(waiting)
        num_pages = {req.seq: match.num_pages for req, match in zip(reqs, self._matches(reqs), strict=True)}
        reqs.sort(key=lambda req: (-num_pages[req.seq], req.seq))
        return overtaken_first(waiting, reqs)
