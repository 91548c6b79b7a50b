"""`Fcfs`: first come, first served."""

from __future__ import annotations

from collections.abc import Iterable

from ..requests.req import Req
from ..requests.waiting_queue import WaitingQueue
from .base import SchedulePolicy


class Fcfs(SchedulePolicy):
    """The order of arrival. Costs nothing, however many wait; nobody starves; the default."""

    name = "fcfs"

    def order(self, waiting: WaitingQueue, now_s: float) -> Iterable[Req]:
        return waiting
