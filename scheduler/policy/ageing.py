"""`overtaken_first`: ageing for orders that do not know how long somebody waits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..req import Req
from ..waiting_queue import WaitingQueue
from .base import MAX_OVERTAKEN


def overtaken_first(waiting: WaitingQueue, order: Iterable[Req]) -> Iterator[Req]:
    """Who was overtaken too often, by arrival, then the others in the given order. Lazy on both sides.

    Whoever waits is overtaken whenever somebody behind it is, so those who were overtaken most stand in front and the
    search ends at the first one who was not. Only requests that have run meanwhile can stand before them with less.
    """
    yielded: set[int] = set()
    for req in waiting:
        if req.num_overtaken >= MAX_OVERTAKEN:
            yielded.add(req.seq)
            yield req
        elif not req.num_retractions:
            break
    for req in order:
        if req.seq not in yielded:
            yield req
