"""`Aborter`: ends requests before their answer is complete: aborts, time limits, failed and unread streams.

The scheduler ends the requests that it has, since only it knows what was computed by then. A request that no scheduler
has (a process is lost, or the request is quarantined) is answered here, at once; so is one whose scheduler hangs.
Such an answer is a finished row, which the caller handles like a row of the detokenizer.

`OrphanReaper` aborts again what the scheduler still runs although the request has ended here.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from ..grammar.backend import MatcherErrorCode
from ..runtime.errors import RequestError
from ..runtime.messages import AbortRequest, Finish, FinishKind, SchedulerInput, TextOutput, Usage
from .generation import Choice, Generation, GenerationRequest
from .prompt_encoder import prompt_name
from .request_log import LoggedRequest, RequestLog
from .telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

MAX_WAITING_ROWS: Final = 32_768
"""Unread rows of one stream, some 20 MB. `http/connection.py` bounds the time that a client may take to read."""
_ANSWER_GRACE_S: Final = 5.0
"""How long a running scheduler may take to answer a request timeout itself. A queue timeout is left to it without a
bound: only the scheduler knows whether the prompt is being computed."""
_TIMEOUT_CODES: Final = {503: "queue_timeout", 504: "request_timeout"}
"""Error code by the status of a request that the scheduler ended at a time limit."""
_MIN_COMPACTED: Final = 64
_QUEUE_TIMEOUT_STATUS: Final = 503
_REQUEST_TIMEOUT_STATUS: Final = 504


class Aborter:
    """Sends aborts, ends streams with errors, and makes finished rows where no scheduler does."""

    def __init__(
        self,
        log: RequestLog,
        *,
        send: Callable[[SchedulerInput], None],
        metrics: Metrics,
        queue_timeout_s: float | None,
        request_timeout_s: float | None,
        clock: Callable[[], float],
    ) -> None:
        """Take the parts.

        Args:
            log: the live requests.
            send: to the scheduler.
            metrics: counts aborted requests.
            queue_timeout_s, request_timeout_s: the server's time limits; None for none.
            clock: CLOCK_MONOTONIC.
        """
        self._log = log
        self._send = send
        self._metrics = metrics
        self._clock = clock
        self._time_limits = TimeLimits(log, queue_timeout_s, request_timeout_s)

    def watch(self, logged: LoggedRequest) -> None:
        """Enforce the time limits of a new request; those of an ended one are dropped when they come up."""
        self._time_limits.add(logged)

    # ------------------------------------------------------------ streams

    def fail(
        self, generation: Generation, error: Exception, reason: str = "another choice of the request failed"
    ) -> None:
        """End a stream with an error, and abort its requests for `reason`, which the logs show."""
        generation.fail(error)
        self.drop(generation, reason)

    def drop(self, generation: Generation, reason: str) -> None:
        """Abort the live requests of a generation that has no reader any more."""
        now_s = self._clock()
        for choice in generation.choices:
            if (logged := self._log.get(choice.rid)) is not None:
                # The message first: a request must not leave the log before its abort was sent.
                self._send(AbortRequest(rid=choice.rid, reason=reason))
                self._metrics.finished_reqs.add("dropped")
                self._log.ended(logged, now_s)

    def fail_slow_readers(self) -> None:
        """End the streams that have more than `MAX_WAITING_ROWS` unread rows."""
        for generation in [one for one in self._log.generations if one.num_waiting_rows > MAX_WAITING_ROWS]:
            error = RequestError(
                f"{generation.num_waiting_rows} events waited for the client to read them, the limit is "
                f"{MAX_WAITING_ROWS}; read faster, or ask for less at once",
                code="client_too_slow",
                status=408,
            )
            self.fail(generation, error, "its client does not read")

    # ------------------------------------------------------------ requests

    # Each of these yields one row at a time, to be delivered before the next: the end of one request may release
    # others from quarantine, which gives them new rids.

    def abort(self, requests: Sequence[LoggedRequest], reason: str) -> Iterator[TextOutput]:
        """Abort requests as a client or the operator asked, for a reason that the logs show.

        Yields:
            finished rows of the requests that no scheduler has; the scheduler makes those of the others.
        """
        for logged in requests:
            logged.choice.abort_asked = True
        for logged in requests:
            if self._log.get(logged.rid) is logged:
                self._send(AbortRequest(rid=logged.rid, reason=reason))
                if not logged.is_sent:
                    yield _finished_row(logged, Finish(FinishKind.ABORT, message=reason))

    def peers_lost(self, message: str) -> Iterator[TextOutput]:
        """Finished rows of the requests with an abort that the lost scheduler had not answered."""
        for logged in list(self._log):
            if logged.choice.abort_asked and self._log.get(logged.rid) is logged:
                yield _finished_row(logged, Finish(FinishKind.ABORT, message=message))

    def time_out(self, now_s: float) -> Iterator[TextOutput]:
        """Abort the requests that are beyond their time limit and that no scheduler answers; their finished rows."""
        for logged, finish in self._time_limits.take_expired(now_s):
            if self._log.get(logged.rid) is logged:
                self._send(AbortRequest(rid=logged.rid, reason="time limit"))
                yield _finished_row(logged, finish)


def _finished_row(logged: LoggedRequest, finish: Finish) -> TextOutput:
    usage = logged.usage or Usage(prompt_tokens=len(logged.choice.prompt_ids), completion_tokens=0)
    return TextOutput(logged.rid, "", b"", usage, finish)


def error_of(finish: Finish, request: GenerationRequest, choice: Choice, rid: str) -> RequestError:
    """The error for the client of a request that the engine ended with this finish; logs it."""
    message = finish.message or f"the engine ended the request ({finish.kind.value})"
    logger.warning("request failed rid=%s status=%d error=%s", rid, finish.status, message)
    param = request.length_param if finish.code == MatcherErrorCode.TOO_SHORT else None
    if request.poolings:
        param = prompt_name(request.prompts, choice.index, request.prompt_param)
        message = f"{param}: {message}"
    code = finish.code or _TIMEOUT_CODES.get(finish.status, "generation_failed")
    return RequestError(message, param=param, code=code, status=finish.status)


class _Due(NamedTuple):
    """One time limit of one request; the heap sorts by the first two fields."""

    at_s: float
    seq: int
    limit_s: float
    is_queue: bool
    logged: LoggedRequest


class TimeLimits:
    """Time limits that the scheduler does not enforce: it is lost, it hangs, or it does not have the request.

    A heap. Limits of requests that have ended stay in it until they come up, or until they are half of it.
    """

    def __init__(
        self, log: RequestLog, queue_timeout_s: float | None, request_timeout_s: float | None
    ) -> None:
        """Use the server's limits; None for none. A request may have shorter ones."""
        self._log = log
        self._queue_timeout_s = queue_timeout_s
        self._request_timeout_s = request_timeout_s
        self._heap: list[_Due] = []
        self._late: list[_Due] = []  # expired, and left to the running scheduler
        self._num_added = 0
        self._compact_at = _MIN_COMPACTED

    def add(self, logged: LoggedRequest) -> None:
        """Add the limits of a new request."""
        message = logged.message
        queue_s, request_s = self._queue_timeout_s, self._request_timeout_s
        if message.background:
            queue_s = request_s = None
        limits = (
            (_shorter(queue_s, message.queue_timeout_s), True),
            (_shorter(request_s, message.timeout_s), False),
        )
        for limit_s, is_queue in limits:
            if limit_s is not None:
                self._num_added += 1
                due = _Due(message.arrival_s + limit_s, self._num_added, limit_s, is_queue, logged)
                heapq.heappush(self._heap, due)
        if len(self._heap) > self._compact_at:  # an entry keeps the prompt of its request
            self._heap = [due for due in self._heap if self._matters(due)]
            heapq.heapify(self._heap)
            self._compact_at = max(2 * len(self._heap), _MIN_COMPACTED)

    def take_expired(self, now_s: float) -> list[tuple[LoggedRequest, Finish]]:
        """The requests to answer now, each with its finish; one per generation, since an error ends all of it."""
        while self._heap and self._heap[0].at_s <= now_s:
            self._late.append(heapq.heappop(self._heap))
        if not self._late:
            return []
        late = [due for due in self._late if self._matters(due)]
        over = {due.logged.generation: due for due in reversed(late) if _is_over(due, now_s)}
        self._late = [due for due in late if due.logged.generation not in over]
        return [(due.logged, _finish(due, now_s)) for due in over.values()]

    def _matters(self, due: _Due) -> bool:
        logged = due.logged
        if self._log.get(logged.rid) is not logged:
            return False  # it has ended
        return not (due.is_queue and logged.choice.first_token_s is not None)


def _is_over(due: _Due, now_s: float) -> bool:
    if due.logged.is_sent:
        return not due.is_queue and now_s - due.at_s > _ANSWER_GRACE_S
    return True


def _finish(due: _Due, now_s: float) -> Finish:
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


_GRACE_S: Final = 2.0  # rows of an aborted request arrive for a step or two
_MAX_ORPHANS: Final = 65_536


class OrphanReaper:
    """Watches the rows of requests that are not in the log.

    An abort is a message like any other. If one is lost, the request runs until its last token without a reader, and
    its rows go on arriving under an id that is not in the request log.
    """

    def __init__(self, send: Callable[[SchedulerInput], None]) -> None:
        """Send aborts to the scheduler through `send`."""
        self._send = send
        self._since_s: dict[
            str, float
        ] = {}  # orphan's id -> time of its first row here, or of its last abort

    @property
    def num_orphans(self) -> int:
        """Orphans with rows so far and no finished row."""
        return len(self._since_s)

    def row(self, output: TextOutput, now_s: float) -> None:
        """Take a row of a request that is not in the log; abort it if its rows go on for longer than the grace time."""
        if output.finish is not None:
            self._since_s.pop(output.rid, None)
            return
        if len(self._since_s) >= _MAX_ORPHANS:
            self._since_s.clear()  # those that still run are added again with their next row
        if now_s - self._since_s.setdefault(output.rid, now_s) > _GRACE_S:
            self._since_s[output.rid] = now_s
            self._send(AbortRequest(rid=output.rid, reason="orphan: not in the request log"))
