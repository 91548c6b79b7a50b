"""`WaitingQueue`: the requests without a row, in order of arrival.

Arrivals and admissions are O(1) in the number of waiting requests, so that ten thousand of them cost a step nothing;
policies that need another order make it themselves from the iteration.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import takewhile
from typing import Protocol

from .req import Req


class QueueObserver(Protocol):
    """Who wants to know about the queue's changes: the policy."""

    def enqueued(self, req: Req) -> None:
        """It joined."""
        ...

    def dequeued(self, req: Req) -> None:
        """It left."""
        ...


class WaitingQueue:
    """An ordered set of requests."""

    __slots__ = ("_observer", "_reqs")

    def __init__(self, observer: QueueObserver) -> None:
        self._observer = observer
        # An OrderedDict and not a dict: a dict that loses its first entries walks over the holes at each iteration.
        self._reqs: OrderedDict[int, Req] = OrderedDict()

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Req]:
        """In order of arrival; do not change the queue meanwhile."""
        return iter(self._reqs.values())

    def append(self, req: Req) -> None:
        """Add a request that arrived after all others."""
        self._reqs[req.seq] = req
        self._observer.enqueued(req)

    def requeue(self, req: Req) -> None:
        """Give a retracted request its old place; the cost is its distance to the nearer end.

        SGLang sends it to the back, which makes it wait for everybody who came after it, and wait longest when the load
        is highest. By arrival it is nearly always first: only requests that it had overtaken stand before it.
        """
        seqs, seq = self._reqs, req.seq
        if not seqs or next(reversed(seqs)) < seq:
            seqs[seq] = req
        elif seq - next(iter(seqs)) < next(reversed(seqs)) - seq:  # nearer to the front
            before = list(takewhile(lambda other: other < seq, seqs))
            seqs[seq] = req
            for other in (seq, *reversed(before)):
                seqs.move_to_end(other, last=False)
        else:
            behind = list(takewhile(lambda other: other > seq, reversed(seqs)))
            seqs[seq] = req
            for other in reversed(behind):
                seqs.move_to_end(other)
        self._observer.enqueued(req)

    def remove(self, req: Req) -> None:
        """Take a request out, wherever it stands."""
        del self._reqs[req.seq]
        self._observer.dequeued(req)
