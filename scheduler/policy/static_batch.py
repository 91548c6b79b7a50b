"""`StaticBatch`: batches that start together and wait for their slowest, as engines did before continuous batching."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from ...runtime.messages import FinishKind
from ..records.verdict import Reason
from ..requests.req import Req, ReqStatus
from ..requests.waiting_queue import WaitingQueue
from .base import PolicyParts, SchedulePolicy
from .ordered_index import OrderedIndex


class StaticBatch(SchedulePolicy):
    """Waits for `batch_size` requests, or `max_wait_s` for fewer; then nobody else until all of them have ended.

    To compare against. Whoever belongs to the batch and does not fit in the first pass, because the step's budget or
    the memory is spent, or who lost its place, still belongs to it and is admitted when it fits. The padding of the
    text book is a matter of what a step costs, not of who is in it.
    """

    name = "static"
    full_reason = Reason.BATCH_RUNNING

    def __init__(self, parts: PolicyParts, batch_size: int, max_wait_s: float) -> None:
        self._load = parts.load
        self._batch_size = batch_size
        self._max_wait_s = max_wait_s
        self._batch: set[int] = set()  # who belongs to it and has not ended
        self._waiting = OrderedIndex()  # by arrival

    def enqueued(self, req: Req) -> None:
        self._waiting.add(req, req.seq)

    def dequeued(self, req: Req) -> None:
        if req.lease is not None and not self._batch:  # the first that is admitted closes the batch
            self._batch = {member.seq for member in self._waiting_members()}
        self._waiting.remove(req)

    def finished(self, req: Req, kind: FinishKind) -> None:
        self._batch.discard(req.seq)

    def hold(self, waiting: WaitingQueue, now_s: float) -> Reason | None:
        if self._batch:
            # Members without a row that do not wait have their KV on the host, and must be let back.
            return None if self._num_without_row() else Reason.BATCH_RUNNING
        wake_s = self.wake_s(waiting)
        if wake_s is None or (len(waiting) < self._batch_size and now_s < wake_s):
            return Reason.BATCH_FORMING
        return None

    def wake_s(self, waiting: WaitingQueue) -> float | None:
        if self._batch or not waiting:
            return None
        oldest = next(iter(waiting))
        return oldest.entered_s[ReqStatus.WAITING] + self._max_wait_s

    def max_offers(self, waiting: WaitingQueue) -> int | None:
        """As promised by the base: members come first in the order, and nobody is offered behind them."""
        return self._num_without_row() if self._batch else self._batch_size

    def order(self, waiting: WaitingQueue, now_s: float) -> Iterable[Req]:
        members = self._waiting_members()
        seqs = {req.seq for req in members}
        return itertools.chain(members, (req for req in waiting if req.seq not in seqs))

    def _waiting_members(self) -> list[Req]:
        """Those of the batch that wait, by arrival; before there is one, those that it will be made of."""
        if self._batch:
            return [req for req in self._waiting if req.seq in self._batch]
        return list(itertools.islice(self._waiting, self._batch_size))

    def _num_without_row(self) -> int:
        return max(0, len(self._batch) - self._load().num_running)
