"""Baselines to compare with: `fifo-serial` and `static`, as engines worked before continuous batching."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from ...runtime.messages import FinishKind
from ..records.verdict import Reason
from ..requests.req import Req
from ..requests.requests import WaitingQueue
from .base import OrderedIndex, PolicyParts, SchedulePolicy


class FifoSerial(SchedulePolicy):
    """`fifo-serial`: by arrival, one request at a time."""

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


class StaticBatch(SchedulePolicy):
    """`static`: waits for `batch_size` requests, or `max_wait_s` for fewer; admits no others until all have finished.

    A request of the batch that does not fit in the first pass, because the step's budget or the memory is spent, or
    that was retracted, stays in the batch and is admitted when it fits. The padding of the textbook concerns the cost
    of a step, not the members of the batch.
    """

    name = "static"
    full_reason = Reason.BATCH_RUNNING

    def __init__(self, parts: PolicyParts, batch_size: int, max_wait_s: float) -> None:
        self._load = parts.load
        self._batch_size = batch_size
        self._max_wait_s = max_wait_s
        self._batch: set[int] = set()  # members that have not finished
        self._waiting = OrderedIndex()  # by arrival

    def enqueued(self, req: Req) -> None:
        self._waiting.add(req, req.seq)

    def dequeued(self, req: Req) -> None:
        if req.lease is not None and not self._batch:  # the first admission closes the batch
            self._batch = {member.seq for member in self._waiting_members()}
        self._waiting.remove(req)

    def finished(self, req: Req, kind: FinishKind) -> None:
        self._batch.discard(req.seq)

    def hold(self, waiting: WaitingQueue, now_s: float) -> Reason | None:
        if self._batch:
            # Members without a row that do not wait are swapped out and must be admitted again.
            return None if self._num_without_row() else Reason.BATCH_RUNNING
        wake_s = self.wake_s(waiting)
        if wake_s is None or (len(waiting) < self._batch_size and now_s < wake_s):
            return Reason.BATCH_FORMING
        return None

    def wake_s(self, waiting: WaitingQueue) -> float | None:
        if self._batch or not waiting:
            return None
        oldest = next(iter(waiting))
        assert oldest.queued_s is not None, "it is in the queue"
        return oldest.queued_s + self._max_wait_s

    def max_offers(self, waiting: WaitingQueue) -> int | None:
        """Members come first in the order, and no request after them is offered."""
        return self._num_without_row() if self._batch else self._batch_size

    def order(self, waiting: WaitingQueue, now_s: float) -> Iterable[Req]:
        members = self._waiting_members()
        seqs = {req.seq for req in members}
        return itertools.chain(members, (req for req in waiting if req.seq not in seqs))

    def _waiting_members(self) -> list[Req]:
        """Waiting members by arrival; before there is a batch, the requests that will form it."""
        if self._batch:
            return [req for req in self._waiting if req.seq in self._batch]
        return list(itertools.islice(self._waiting, self._batch_size))

    def _num_without_row(self) -> int:
        return max(0, len(self._batch) - self._load().num_running)
