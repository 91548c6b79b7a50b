"""`Priority`: urgent requests first."""

from __future__ import annotations

from ..requests.req import Req
from .static_order import StaticOrder


class Priority(StaticOrder):
    """Larger `Req.priority` first, equals by arrival; every `ageing_s` seconds of waiting count as one level.

    So a request of priority p is overtaken by those of priority q that come within `(q - p) * ageing_s` seconds after
    it, and by no later ones. With `ageing_s` 0 priorities are strict, and low ones may starve. Nobody displaces a
    running request that would come before it in the queue: else one that has waited its time would be started and
    interrupted again and again.
    """

    name = "priority"
    by_priority = True

    def __init__(self, ageing_s: float, *, preempts: bool) -> None:
        super().__init__()
        self._ageing_s = ageing_s
        self.preempts = preempts

    def key(self, req: Req) -> float:
        if not self._ageing_s:
            return -req.priority
        return req.arrival_s / self._ageing_s - req.priority

    def may_displace(self, req: Req, victim: Req) -> bool:
        return self.preempts and self.key(req) < self.key(victim)
