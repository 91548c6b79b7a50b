"""`TimeLimits`: time limits of requests that no scheduler watches: it is lost, it hangs, or they wait for their trial.

The scheduler of a request answers it when its time is over, and says best what was done by then. Who is not with one is
answered here, at once; and here, too, who gets no answer from a scheduler that hangs and is not known to.
"""

from __future__ import annotations

import heapq
from typing import Final, NamedTuple

from ..runtime.messages import Finish, FinishKind
from .request_log import LoggedRequest, RequestLog

_ANSWER_GRACE_S: Final = 5.0
"""For the scheduler's own answer. That to a queue timeout is waited for as long as the scheduler lives: only it knows
whether the prompt is being computed."""
_MIN_COMPACTED: Final = 64
_QUEUE_TIMEOUT_STATUS: Final = 503
_REQUEST_TIMEOUT_STATUS: Final = 504


class _Due(NamedTuple):
    """One limit; the heap sorts by the first two."""

    at_s: float
    seq: int
    limit_s: float
    is_queue: bool
    logged: LoggedRequest


class TimeLimits:
    """A heap of limits; those that no longer matter stay in it until they come up, or make up half of it."""

    def __init__(
        self, log: RequestLog, queue_timeout_s: float | None, request_timeout_s: float | None
    ) -> None:
        """The server's limits; None for none. A request may bring shorter ones."""
        self._log = log
        self._queue_timeout_s = queue_timeout_s
        self._request_timeout_s = request_timeout_s
        self._heap: list[_Due] = []
        self._late: list[_Due] = []  # their time is over, and their scheduler lives
        self._num_added = 0
        self._compact_at = _MIN_COMPACTED

    def add(self, logged: LoggedRequest) -> None:
        """Watch a new request."""
        message = logged.message
        limits = (
            (_shorter(self._queue_timeout_s, message.queue_timeout_s), True),
            (_shorter(self._request_timeout_s, message.timeout_s), False),
        )
        for limit_s, is_queue in limits:
            if limit_s is not None:
                self._num_added += 1
                due = _Due(message.arrival_s + limit_s, self._num_added, limit_s, is_queue, logged)
                heapq.heappush(self._heap, due)
        if len(self._heap) > self._compact_at:  # they would keep the prompts of requests that are long gone
            self._heap = [due for due in self._heap if self._matters(due)]
            heapq.heapify(self._heap)
            self._compact_at = max(2 * len(self._heap), _MIN_COMPACTED)

    def take_expired(self, now_s: float) -> list[tuple[LoggedRequest, Finish]]:
        """Whom nobody else answers, with what to tell them; each request once."""
        while self._heap and self._heap[0].at_s <= now_s:
            self._late.append(heapq.heappop(self._heap))
        if not self._late:
            return []
        late = [due for due in self._late if self._matters(due)]
        over = {due.logged: due for due in reversed(late) if _is_over(due, now_s)}
        self._late = [due for due in late if due.logged not in over]
        return [(logged, _answer(due, now_s)) for logged, due in over.items()]

    def _matters(self, due: _Due) -> bool:
        logged = due.logged
        if self._log.get(logged.rid) is not logged:
            return False  # it has ended
        return not (due.is_queue and logged.choice.first_token_s is not None)


def _is_over(due: _Due, now_s: float) -> bool:
    if due.logged.is_sent:
        return not due.is_queue and now_s - due.at_s > _ANSWER_GRACE_S
    return True


def _answer(due: _Due, now_s: float) -> Finish:
    logged = due.logged
    took_s = now_s - logged.message.arrival_s
    why = "" if logged.is_sent else ", while a process of the server was lost or being restarted"
    if due.is_queue:
        message = (
            f"the request waited {took_s:.1f} s to be started{why}, the limit is {due.limit_s:g} s; retry later, or "
            f"raise queue_timeout"
        )
        return Finish(FinishKind.ERROR, message=message, status=_QUEUE_TIMEOUT_STATUS)
    num_tokens = 0 if logged.usage is None else logged.usage.completion_tokens
    message = (
        f"the request took {took_s:.1f} s{why}, and had generated {num_tokens} of at most "
        f"{logged.message.sampling.max_new_tokens} tokens, the limit is {due.limit_s:g} s; retry, lower max_tokens, or "
        f"raise timeout"
    )
    return Finish(FinishKind.ERROR, message=message, status=_REQUEST_TIMEOUT_STATUS)


def _shorter(server_s: float | None, own_s: float | None) -> float | None:
    limits = [limit for limit in (server_s, own_s) if limit is not None]
    return min(limits, default=None)
