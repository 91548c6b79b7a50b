"""`FifoSerial`: one request at a time, the oldest baseline there is."""

from __future__ import annotations

from collections.abc import Iterable

from ..records.verdict import Reason
from ..requests.req import Req
from ..requests.waiting_queue import WaitingQueue
from .base import PolicyParts, SchedulePolicy


class FifoSerial(SchedulePolicy):
    """By arrival, and nobody starts before the one that runs has ended. To compare against, not to be used."""

    name = "fifo-serial"
    full_reason = Reason.ONE_AT_A_TIME

    def __init__(self, parts: PolicyParts) -> None:
        self._load = parts.load

    def hold(self, waiting: WaitingQueue, now_s: float) -> Reason | None:
        return Reason.ONE_AT_A_TIME if self._load().num_running else None

    def max_offers(self, waiting: WaitingQueue) -> int | None:
        return 1

    def order(self, waiting: WaitingQueue, now_s: float) -> Iterable[Req]:
        return waiting
