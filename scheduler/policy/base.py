"""`SchedulePolicy`: the protocol of all policies, and how they are made from their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol

from ..req import Req
from ..waiting_queue import WaitingQueue

MAX_OVERTAKEN: Final = 32
"""Ageing: who was overtaken in so many passes is overtaken no more (see `Admission._note_overtaken`)."""


class SchedulePolicy(Protocol):
    """Orders the waiting queue. Asked once per pass; must not change anything."""

    def order(self, waiting: WaitingQueue) -> Iterable[Req]:
        """The requests in the order in which they should be admitted.

        May be lazy: the pass ends when a budget is spent, usually after a few requests of many. Requests that were
        overtaken `MAX_OVERTAKEN` times come first.
        """
        ...


PrefixLenOf = Callable[[Req], int]  # pages of a waiting request that the prefix cache has
