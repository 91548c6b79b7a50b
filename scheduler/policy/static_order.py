"""`StaticOrder`: what policies have in common whose order of two requests never changes while both wait."""

from __future__ import annotations

from collections.abc import Iterable

from ..requests.req import Req
from ..requests.waiting_queue import WaitingQueue
from .base import SchedulePolicy
from .ordered_index import OrderedIndex


class StaticOrder(SchedulePolicy):
    """By ascending `key`, equals by arrival.

    Linear ageing is static, too: if every second of waiting lowers the key by `a`, all keys sink together, and
    `key - a * waited` compares as `key + a * arrival` does. So nothing has to be sorted again as time goes by, and
    nobody starves: a request that comes later than `key / a` seconds after another one can never overtake it, so
    only finitely many do.
    """

    def __init__(self) -> None:
        self._index = OrderedIndex()

    def key(self, req: Req) -> float:
        """Smaller comes earlier. Asked once, when the request joins the queue."""
        raise NotImplementedError

    def enqueued(self, req: Req) -> None:
        self._index.add(req, self.key(req))

    def dequeued(self, req: Req) -> None:
        self._index.remove(req)

    def order(self, waiting: WaitingQueue, now_s: float) -> Iterable[Req]:
        return self._index
