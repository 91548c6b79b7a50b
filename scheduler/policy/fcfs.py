"""`Fcfs`: first come, first served."""

from __future__ import annotations

from collections.abc import Iterable

from ..req import Req
from ..waiting_queue import WaitingQueue


class Fcfs:
    """The order of arrival. Costs nothing, however many wait; nobody starves; the default."""

    def order(self, waiting: WaitingQueue) -> Iterable[Req]:
        return waiting
