"""`overtaken_first`: ageing for orders that do not consider waiting time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from ..requests.req import MAX_OVERTAKEN, Req
from ..requests.waiting_queue import WaitingQueue

MAX_PASSED: Final = 256
"""The search ends after this many requests that were not overtaken; `Admission` counts it for as many."""


def overtaken_first(waiting: WaitingQueue, order: Iterable[Req]) -> Iterator[Req]:
    """Requests that were overtaken in `MAX_OVERTAKEN` passes, by arrival, then the others in the given order. Lazy.

    When a request is overtaken, all that arrived before it and still wait are overtaken as well. So the most overtaken
    requests stand at the front of the queue, except for those that joined later than they arrived: retracted ones, or
    ones that waited for their grammar.
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
