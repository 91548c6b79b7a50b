"""`EarlyEnds`: requests that end before their answer does: aborted, or out of time.

The scheduler ends a request that it has, and knows best what was done by then. One that no scheduler has, because it is
lost or the request waits for its trial, is answered here, at once; and so is whoever gets no answer from a scheduler
that hangs, see `TimeLimits`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..runtime.messages import AbortRequest, Finish, FinishKind, SchedulerInput, TextOutput, Usage
from .request_log import LoggedRequest, RequestLog
from .time_limits import TimeLimits


class EarlyEnds:
    """Sends aborts, and makes the last rows that nobody else makes."""

    def __init__(
        self,
        log: RequestLog,
        time_limits: TimeLimits,
        *,
        send: Callable[[SchedulerInput], None],
        deliver: Callable[[TextOutput, float], None],
    ) -> None:
        """Take the parts.

        Args:
            log: the live requests.
            time_limits: of theirs.
            send: to the scheduler.
            deliver: takes a row, and the time, as if it had come from the detokenizer.
        """
        self._log = log
        self._time_limits = time_limits
        self._send = send
        self._deliver = deliver

    def add(self, logged: LoggedRequest) -> None:
        """Watch the time of a new request."""
        self._time_limits.add(logged)

    def abort(self, requests: Iterable[LoggedRequest], reason: str, now_s: float) -> None:
        """Somebody wants these to end, for a reason that the logs will have."""
        for logged in requests:
            logged.choice.abort_asked = True
            self._send(AbortRequest(rid=logged.rid, reason=reason))
            if not logged.is_sent:
                self._end(logged, Finish(FinishKind.ABORT, message=reason), now_s)

    def lost(self, message: str, now_s: float) -> None:
        """A scheduler is lost, with the aborts that it had not answered."""
        for logged in self._log:
            if logged.choice.abort_asked:
                self._end(logged, Finish(FinishKind.ABORT, message=message), now_s)

    def check_time(self, now_s: float) -> None:
        """Answer those whose time is over and whom nobody else answers."""
        for logged, finish in self._time_limits.take_expired(now_s):
            if self._log.get(logged.rid) is logged:  # a sibling may have ended it in this very loop
                self._send(AbortRequest(rid=logged.rid, reason="its time is over"))
                self._end(logged, finish, now_s)

    def _end(self, logged: LoggedRequest, finish: Finish, now_s: float) -> None:
        usage = logged.usage or Usage(prompt_tokens=len(logged.choice.prompt_ids), completion_tokens=0)
        self._deliver(TextOutput(logged.rid, "", b"", usage, finish), now_s)
