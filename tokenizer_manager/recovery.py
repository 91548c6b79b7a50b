"""`Recovery`: live requests while the scheduler or the detokenizer is lost, and after its restart.

Meanwhile streams pause, and new requests wait in the request log, where they count for the queue's limit. After the
restart every live request is submitted again with the tokens that were delivered, so that its client sees a pause and
nothing else. `PoisonDetector` finds the requests that may have caused the loss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Final

from ..runtime.errors import RequestError
from ..runtime.messages import AbortRequest, SchedulerInput
from .aborter import Aborter
from .admission.queue_limiter import QueueLimiter
from .engine_state import EngineState
from .poison_detector import PoisonDetector
from .request_log import LoggedRequest, RequestLog
from .telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

_POISON: Final = (
    "a process of the server was lost twice while it worked on this request, which is not tried again; change the "
    "request before you send it again, and report it to the operator: the server's log has the cause"
)


class Recovery:
    """Submits requests, new ones and those of a lost process. A `RequestObserver`."""

    def __init__(
        self,
        log: RequestLog,
        engine: EngineState,
        *,
        limiter: QueueLimiter,
        aborter: Aborter,
        metrics: Metrics,
        send: Callable[[SchedulerInput], None],
    ) -> None:
        """Take the parts.

        Args:
            log: the live requests.
            engine: whether its processes run; `lost_reason` is set here.
            limiter: told of all requests that are submitted again.
            aborter: ends poison requests.
            metrics: counts resubmissions.
            send: to the scheduler.
        """
        self._log = log
        self._engine = engine
        self._limiter = limiter
        self._aborter = aborter
        self._metrics = metrics
        self._send = send
        self._detector = PoisonDetector()

    def opened(self, logged: LoggedRequest, now_s: float) -> None:
        """Send a new request, or leave it in the log until the processes run again; see `RequestObserver`."""
        if self._engine.lost_reason is None:
            self._send(logged.send())

    def ended(self, logged: LoggedRequest, now_s: float) -> None:
        """See `RequestObserver`. The end of a quarantined request may release the next group."""
        if logged.num_crashes:
            self._release(self._detector.next_group(logged, now_s, ended=True))

    def progressed(self, logged: LoggedRequest, now_s: float) -> None:
        """Tokens of a request with `num_crashes` > 0 have arrived."""
        self._release(self._detector.next_group(logged, now_s, ended=False))

    def check_time(self, now_s: float) -> None:
        """Release the next group if the running one makes no progress."""
        if self._engine.lost_reason is None:
            self._release(self._detector.overdue_group(now_s))

    def lost(self, reason: str, now_s: float, started: Collection[str] | None = None) -> None:
        """The scheduler or the detokenizer is lost, with its state of every request; it will be restarted.

        Args:
            reason: for `/health` and for calls to the scheduler.
            now_s: the time.
            started: ids of the requests that the scheduler had started; None if unknown.
        """
        logger.warning("streams pause live_requests=%d: %s", len(self._log), reason)
        self._engine.lost_reason = reason
        self._detector.lost(self._log, started)
        # Running requests are queued now as well: one that ends frees its place at once, not with the next report.
        self._limiter.restarted(len(self._log), now_s)

    def back(self, now_s: float, restarts_left: int = 0) -> None:
        """Both processes run again: submit every live request.

        Args:
            now_s: the time.
            restarts_left: further losses that the server survives.
        """
        poison = self._detector.isolate(self._log, restarts_left, now_s)
        for logged in poison:
            logger.error("not submitted a third time rid=%s", logged.rid)
            self._aborter.fail(logged.generation, RequestError(_POISON, code="poison_request", status=500))
        self._engine.lost_reason = None
        self._limiter.restarted(len(self._log), now_s)
        live = list(self._log)
        submitted = self._detector.to_submit(live)
        running = set(submitted)
        quarantined = [logged for logged in live if logged not in running]
        for rid in self._log.hold_back(quarantined):
            self._send(AbortRequest(rid=rid, reason="quarantined"))
        self._submit(submitted)
        logger.info(
            "streams go on live_requests=%d failed=%d quarantined=%d",
            len(self._log),
            len(poison),
            self._detector.num_quarantined,
        )

    def _release(self, group: list[LoggedRequest]) -> None:
        if group and self._engine.lost_reason is None:  # otherwise `back` submits them with all others
            self._submit(group)

    def _submit(self, requests: Iterable[LoggedRequest]) -> None:
        """Send logged requests, for the first time or again."""
        for logged, lost_rid in self._log.resubmit(requests):
            if lost_rid is not None:
                # A scheduler that survived the detokenizer, or that got the earlier message, must not run both.
                self._send(AbortRequest(rid=lost_rid, reason="submitted again"))
                self._metrics.num_resumed_reqs += 1
            self._send(logged.message)
