"""`Recovery`: what becomes of live requests while the scheduler or the detokenizer is gone, and when it is back.

Streams pause meanwhile, and new requests wait in the request log: they count for the queue's limit as any others. Then
every live request is submitted again as far as its answer was delivered, and its client sees no more than the pause.
Which of them may have been the cause is the matter of `Suspects`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Final

from ..runtime.errors import RequestError
from ..runtime.messages import AbortRequest, SchedulerInput
from .admission.queue_limiter import QueueGate
from .generation import Generation
from .metrics import Metrics
from .poison_detector import Suspects
from .request_log import LoggedRequest, RequestLog

logger = logging.getLogger(__name__)

_POISON: Final = (
    "a process of the server was lost twice while it worked on this request, which is not tried again; change the "
    "request before you send it again, and tell who runs the server: its log has the cause"
)


class Recovery:
    """Submits requests, now or later.

    Attributes:
        reason: why there is no scheduler or no detokenizer at present; None if there is.
    """

    def __init__(
        self,
        log: RequestLog,
        *,
        gate: QueueGate,
        metrics: Metrics,
        send: Callable[[SchedulerInput], None],
        fail: Callable[[Generation, RequestError], None],
    ) -> None:
        """All is well in the beginning.

        Args:
            fail: ends a stream with an error, and all its requests.
        """
        self.reason: str | None = None
        self._log = log
        self._gate = gate
        self._metrics = metrics
        self._send = send
        self._fail = fail
        self._suspects = Suspects()

    def submit_new(self, logged: LoggedRequest) -> None:
        """Send a request that has just been logged, or let it wait."""
        if self.reason is None:
            self._send(logged.send())

    def lost(self, reason: str, now_s: float, started: Collection[str] | None = None) -> None:
        """The scheduler or the detokenizer is gone, and with it what they had of every request; it will be back.

        Args:
            reason: for those who ask.
            now_s: the time.
            started: the ids of requests that had been begun; None: nobody knows.
        """
        logger.warning("streams pause live_requests=%d: %s", len(self._log), reason)
        self.reason = reason
        self._suspects.lost(self._log, started)
        # Whatever ran waits as well now: who ends meanwhile makes room at once, and not with a report.
        self._gate.restarted(len(self._log), now_s)

    def back(self, now_s: float, restarts_left: int = 0) -> None:
        """Both are there again: submit every live request.

        Args:
            now_s: the time.
            restarts_left: how many more losses the server survives.
        """
        guilty = self._suspects.judge(self._log, restarts_left, now_s)
        for logged in guilty:
            logger.error("not submitted a third time rid=%s", logged.rid)
            self._fail(logged.generation, RequestError(_POISON, code="poison_request", status=500))
        self.reason = None
        self._gate.restarted(len(self._log), now_s)
        live = list(self._log)
        submitted = self._suspects.to_submit(live)
        running = set(submitted)
        waiting = [logged for logged in live if logged not in running]
        for rid in self._log.take_back(waiting):
            self._send(AbortRequest(rid=rid, reason="waits for its trial"))
        self._submit(submitted)
        logger.info(
            "streams go on live_requests=%d failed=%d on_trial=%d",
            len(self._log),
            len(guilty),
            self._suspects.num_on_trial,
        )

    def progressed(self, logged: LoggedRequest, now_s: float) -> None:
        """Tokens of a request with strikes have arrived."""
        self._try(self._suspects.next_to_try(logged, now_s, ended=False))

    def ended(self, logged: LoggedRequest, now_s: float) -> None:
        """A request has left the log."""
        if logged.num_strikes:
            self._try(self._suspects.next_to_try(logged, now_s, ended=True))

    def check_time(self, now_s: float) -> None:
        """A trial does not last for ever."""
        if self.reason is None:
            self._try(self._suspects.overdue(now_s))

    def _try(self, suspects: list[LoggedRequest]) -> None:
        if suspects and self.reason is None:  # else they are submitted with all others
            self._submit(suspects)

    def _submit(self, requests: Iterable[LoggedRequest]) -> None:
        """Send logged requests, for the first time or again."""
        for logged, lost_rid in self._log.send_again(requests):
            if lost_rid is not None:
                # A scheduler that has outlived the detokenizer, or got the message of before, shall not work on both.
                self._send(AbortRequest(rid=lost_rid, reason="submitted again"))
                self._metrics.num_resumed_reqs += 1
            self._send(logged.message)
