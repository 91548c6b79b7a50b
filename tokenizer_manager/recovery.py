"""`Recovery`: live requests while the scheduler or the detokenizer of a replica is lost, and after its restart.

Every live request of a lost replica is submitted again with the tokens that were delivered, so that its client sees a
pause and nothing else: at once to the other replicas if there are any, otherwise after the restart. While no replica
runs, streams pause, and new requests wait in the request log, where they count for the queue's limit. `PoisonDetector`
finds the requests that may have caused the loss.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Final

from ..runtime.errors import RequestError
from ..runtime.feasibility import Capacity
from ..runtime.messages import AbortRequest
from .aborter import Aborter
from .admission.queue_limiter import QueueLimiter
from .dispatch.dispatcher import Dispatcher
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
    """Submits the requests of a lost process again."""

    def __init__(
        self,
        log: RequestLog,
        engine: EngineState,
        *,
        limiter: QueueLimiter,
        aborter: Aborter,
        metrics: Metrics,
        dispatcher: Dispatcher,
    ) -> None:
        """Take the parts.

        Args:
            log: the live requests.
            engine: which replicas run; notified here of losses and restarts.
            limiter: counts all requests that are submitted again.
            aborter: ends poison requests.
            metrics: counts resubmissions.
            dispatcher: sends requests to the replicas.
        """
        self._log = log
        self._engine = engine
        self._limiter = limiter
        self._aborter = aborter
        self._metrics = metrics
        self._dispatcher = dispatcher
        self._detector = PoisonDetector()

    def ended(self, logged: LoggedRequest, now_s: float) -> None:
        """The end of a quarantined request may release the next group."""
        if logged.num_crashes:
            self._release(self._detector.next_group(logged, now_s, ended=True))

    def progressed(self, logged: LoggedRequest, now_s: float) -> None:
        """Tokens of a request with `num_crashes` > 0 have arrived."""
        self._release(self._detector.next_group(logged, now_s, ended=False))

    def check_time(self, now_s: float) -> None:
        """Release the next group if the running one makes no progress."""
        if self._engine.running:
            self._release(self._detector.overdue_group(now_s))

    def lost(
        self,
        reason: str,
        now_s: float,
        started: Collection[str] | None = None,
        replica: int = 0,
        restarts_left: int = 0,
    ) -> None:
        """The scheduler or the detokenizer of a replica is lost, with its state of every request; it will be restarted.

        Args:
            reason: for `/health` and for calls to the scheduler.
            now_s: the time.
            started: ids of the requests that the scheduler had started; None if unknown.
            replica: its number.
            restarts_left: further losses that the server survives.
        """
        concerned = [logged for logged in self._log if logged.replica == replica]
        self._engine.lost(replica, reason)
        self._dispatcher.lost(replica)
        self._detector.lost(concerned, started)
        for logged in concerned:
            self._dispatcher.withdraw(logged)
        if self._engine.running:
            logger.warning(
                "replica %d is lost; its requests move live_requests=%d: %s", replica, len(concerned), reason
            )
            self._submit_again(now_s, restarts_left)
            return
        logger.warning("streams pause live_requests=%d: %s", len(self._log), reason)
        # Running requests are queued now as well: one that ends frees its place at once, not with the next report.
        self._limiter.restarted(len(self._log), now_s)

    def back(self, capacity: Capacity, now_s: float, replica: int = 0, restarts_left: int = 0) -> None:
        """Both processes of a replica run again: submit the live requests that no replica has.

        Args:
            capacity: of the new scheduler.
            now_s: the time.
            replica: its number.
            restarts_left: further losses that the server survives.
        """
        is_first = not self._engine.running
        self._engine.restarted(replica, capacity)
        if is_first:
            self._submit_again(now_s, restarts_left)
        else:
            logger.info("replica %d runs again", replica)

    def _submit_again(self, now_s: float, restarts_left: int) -> None:
        """Submit the requests that no replica has, but for poison and the waiting ones of the quarantine."""
        poison = self._detector.isolate(self._log, restarts_left, now_s)
        for logged in poison:
            logger.error("not submitted a third time rid=%s", logged.rid)
            self._aborter.fail(logged.generation, RequestError(_POISON, code="poison_request", status=500))
        self._limiter.restarted(len(self._log), now_s)
        live = list(self._log)
        permitted = set(self._detector.to_submit(live))
        for rid in self._log.hold_back([logged for logged in live if logged not in permitted]):
            self._dispatcher.send(AbortRequest(rid=rid, reason="quarantined"))
        self._submit(logged for logged in live if logged in permitted and not logged.is_sent)
        logger.info(
            "streams go on live_requests=%d failed=%d quarantined=%d",
            len(self._log),
            len(poison),
            self._detector.num_quarantined,
        )

    def _release(self, group: list[LoggedRequest]) -> None:
        if group and self._engine.running:  # otherwise `back` submits them with all others
            self._submit(group)

    def _submit(self, requests: Iterable[LoggedRequest]) -> None:
        """Send logged requests: again, or for the first time those that arrived while no replica ran."""
        for logged, lost_rid in self._log.resubmit(requests):
            if lost_rid is not None:
                # A scheduler that survived the detokenizer, or that got the earlier message, must not run both.
                self._dispatcher.send(AbortRequest(rid=lost_rid, reason="submitted again"))
                self._metrics.num_resumed_reqs += 1
            self._dispatcher.submit(logged)
