"""`overtaken_first`: ageing for orders that do not know how long somebody waits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from ..requests.req import MAX_OVERTAKEN, Req
from ..requests.waiting_queue import WaitingQueue

MAX_PASSED: Final = 256
"""The search passes over so many requests that were not overtaken; `Admission` counts it for as many."""


def overtaken_first(waiting: WaitingQueue, order: Iterable[Req]) -> Iterator[Req]:
    """Who was overtaken too often, by arrival, then the others in the given order. Lazy on both sides.

    Whoever waits is overtaken whenever somebody behind it is, so those who were overtaken most stand in front, apart
    from requests that joined later than they arrived: they have run meanwhile, or their grammar took its time.
    """
    yielded: set[int] = set()
    num_passed = 0
    for req in waiting:
        if req.num_overtaken >= MAX_OVERTAKEN:
            yielded.add(req.seq)
            yield req
        elif (num_passed := num_passed + 1) > MAX_PASSED:
            break
    for req in order:
        if req.seq not in yielded:
            yield req
