"""`Deadlines`: ends requests that wait too long to be started, or take too long in all."""

from __future__ import annotations

import heapq
from typing import Final, NamedTuple

from ...runtime.messages import Finish, FinishKind, GenerateRequest
from .req import Req, ReqStatus

QUEUE_TIMEOUT_STATUS: Final = 503
REQUEST_TIMEOUT_STATUS: Final = 504
_MIN_COMPACTED: Final = 64
_STARTED: Final = (ReqStatus.PREFILL, ReqStatus.RETRACTED)


class Due(NamedTuple):
    """One deadline. The heap sorts by the first two fields."""

    at_s: float
    seq: int
    limit_s: float
    is_queue: bool
    req: Req

    @property
    def has_passed(self) -> bool:
        """Whether it does not apply any more: the request has ended, or was started, also by a lost scheduler."""
        if self.req.status is ReqStatus.FINISHED:
            return True
        return self.is_queue and not self.req.entered_s.keys().isdisjoint(_STARTED)


class Deadlines:
    """A heap of deadlines. Passed ones stay until they reach the top, or until compaction removes them."""

    def __init__(self, queue_timeout_s: float | None, request_timeout_s: float | None) -> None:
        """The limits of the server; None: no limit. A request may have shorter limits."""
        self._queue_timeout_s = queue_timeout_s
        self._request_timeout_s = request_timeout_s
        self._heap: list[Due] = []
        self._compact_at = _MIN_COMPACTED

    def add(self, req: Req, message: GenerateRequest) -> None:
        """Add the deadlines of a new request; one of the background, which may wait long, has only its own."""
        queue_s, request_s = (
            (None, None) if req.background else (self._queue_timeout_s, self._request_timeout_s)
        )
        limits = (
            (_shorter(queue_s, message.queue_timeout_s), True),
            (_shorter(request_s, message.timeout_s), False),
        )
        for limit_s, is_queue in limits:
            if limit_s is not None:
                due = Due(req.arrival_s + limit_s, 2 * req.seq + is_queue, limit_s, is_queue, req)
                heapq.heappush(self._heap, due)
        if (
            len(self._heap) > self._compact_at
        ):  # else entries of requests that have ended could stay as long as the oldest request
            self._heap = [due for due in self._heap if not due.has_passed]
            heapq.heapify(self._heap)
            self._compact_at = max(2 * len(self._heap), _MIN_COMPACTED)

    def next_s(self) -> float | None:
        """Time of the next deadline that still applies; None if there is none."""
        while self._heap and self._heap[0].has_passed:
            heapq.heappop(self._heap)
        return self._heap[0].at_s if self._heap else None

    def take_expired(self, now_s: float) -> list[tuple[Req, Finish]]:
        """Requests past their deadline, with the `Finish` to send; each request once."""
        expired: dict[str, tuple[Req, Finish]] = {}
        while (next_s := self.next_s()) is not None and next_s <= now_s:
            due = heapq.heappop(self._heap)
            if due.req.rid not in expired:
                expired[due.req.rid] = (due.req, _answer(due, now_s))
        return list(expired.values())


def _answer(due: Due, now_s: float) -> Finish:
    took_s = now_s - due.req.arrival_s
    if due.is_queue:
        message = (
            f"the request waited {took_s:.1f} s to be started, the limit is {due.limit_s:g} s; "
            f"retry later, or raise queue_timeout"
        )
        return Finish(FinishKind.ERROR, message=message, status=QUEUE_TIMEOUT_STATUS)
    if due.req.pooling is not None:
        message = (
            f"the request took {took_s:.1f} s and its result was not ready, the limit is {due.limit_s:g} s; send fewer "
            "inputs at once, or raise timeout"
        )
        return Finish(FinishKind.ERROR, message=message, status=REQUEST_TIMEOUT_STATUS)
    message = (
        f"the request took {took_s:.1f} s and had generated {due.req.output_len} of at most "
        f"{due.req.max_new_tokens} tokens, the limit is {due.limit_s:g} s; lower max_tokens, or raise timeout"
    )
    return Finish(FinishKind.ERROR, message=message, status=REQUEST_TIMEOUT_STATUS)


def _shorter(server_s: float | None, own_s: float | None) -> float | None:
    limits = [limit for limit in (server_s, own_s) if limit is not None]
    return min(limits, default=None)
