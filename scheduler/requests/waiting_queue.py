"""`WaitingQueue`: the requests without a row, in order of arrival.

Arrivals and admissions are O(1) in the number of waiting requests, so ten thousand waiting requests do not slow down a
step. A policy that needs another order makes it from the iteration.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import takewhile
from typing import Protocol

from .req import Req


class QueueObserver(Protocol):
    """Is told of the queue's changes. Policies implement it."""

    def enqueued(self, req: Req) -> None:
        """The request has joined the queue."""
        ...

    def dequeued(self, req: Req) -> None:
        """The request has left the queue."""
        ...


class WaitingQueue:
    """A set of requests in order of arrival.

    Attributes:
        num_tokens: of all of them, prompts and what retracted ones have generated.
    """

    def __init__(self, observer: QueueObserver) -> None:
        self.num_tokens = 0
        self._observer = observer
        # An OrderedDict instead of a dict: iterating a dict that has lost its first entries skips over the holes.
        self._reqs: OrderedDict[int, Req] = OrderedDict()

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Req]:
        """Iterate in order of arrival. Do not change the queue meanwhile."""
        return iter(self._reqs.values())

    def append(self, req: Req) -> None:
        """Add a request that arrived after all others."""
        self._reqs[req.seq] = req
        self.num_tokens += req.fill_len
        self._observer.enqueued(req)

    def requeue(self, req: Req) -> None:
        """Insert a retracted request at its position by arrival. The cost is the distance to the nearer end.

        SGLang appends a retracted request to the end of the queue. There it waits for all later arrivals, and longest
        when the load is highest. By arrival it is nearly always first: only requests that it overtook are before it.
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
        self.num_tokens += req.fill_len
        self._observer.enqueued(req)

    def remove(self, req: Req) -> None:
        """Remove a request from any position."""
        del self._reqs[req.seq]
        self.num_tokens -= req.fill_len
        self._observer.dequeued(req)
