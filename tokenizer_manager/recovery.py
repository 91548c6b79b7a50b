"""`Recovery`: live requests while the scheduler or the detokenizer of a replica is lost, and after its restart.

Every live request of a lost replica is submitted again with the tokens that were delivered, so that its client sees a
pause and nothing else: at once to the other replicas if there are any, otherwise after the restart. While no replica
runs, streams pause, and new requests wait in the request log, where they count for the queue's limit. `PoisonDetector`
finds the requests that may have caused the loss.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable
from typing import Final

from ..runtime.errors import RequestError
from ..runtime.feasibility import Capacity
from ..runtime.messages import AbortRequest, Call, Pause
from .aborter import Aborter
from .dispatch.dispatcher import Dispatcher
from .engine_state import EngineState
from .overload.queue_limiter import QueueLimiter
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
        if self._engine.pause is not None:
            self._dispatcher.send(Call(0, Pause(self._engine.pause)))  # to all: the others are paused already
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


MIN_PROGRESS_TOKENS: Final = 16
MAX_GROUP_S: Final = 30.0
"""After this time the next group is submitted as well, and is larger: a request without progress must not block it."""
_MAX_CRASHES: Final = 2
_MAX_GROUPS: Final = 32

_Group = dict[LoggedRequest, None]
"""An ordered set."""


class PoisonDetector:
    """Finds the requests that crash a process, among all that ran when one was lost, and holds the quarantine.

    A request is *suspect* at a loss if it ran and had fewer than `MIN_PROGRESS_TOKENS` new tokens since it was
    submitted: a poison request crashes at the same place again, while the others advance. A request that only
    waited in the scheduler's queue, and had not just arrived, is suspect only if no request ran. One loss has no
    consequence: most are caused by no request. After two consecutive losses with the same suspects:

    - A single suspect is poison: it gets an error, and is not submitted a third time.
    - Several suspects are quarantined: they are submitted in groups, each when the group before it has advanced or
      ended, while all other requests run. A loss while a group runs is caused by that group, which is divided again
      until one request is left. That one is poison, and the requests that are still quarantined are released.

    The size of a group follows from the restarts that are left: halves if there are plenty; single requests if the
    server survives one more loss only, which then finds the poison request for sure. There are at most
    `_MAX_GROUPS` groups. A request that crashes its process is thus found at the second loss, or at the third or a
    later one if it started together with others; none of the others is failed for it.

    `LoggedRequest.num_crashes` counts the losses of each request.
    """

    def __init__(self) -> None:
        self._suspects: list[LoggedRequest] = []  # of the losses since the last `isolate`
        self._running: _Group = {}  # quarantined and submitted
        self._waiting: list[
            _Group
        ] = []  # quarantined and not submitted; the last group is the most suspect one
        self._restarts_left = 0
        self._group_began_s = 0.0

    @property
    def num_quarantined(self) -> int:
        """Requests in quarantine, submitted or not."""
        return len(self._running) + sum(map(len, self._waiting))

    def lost(self, live: Iterable[LoggedRequest], started: Collection[str] | None = None) -> None:
        """A process is lost, with every request that was sent to it.

        Args:
            live: all requests.
            started: ids of the requests that the scheduler had started or was receiving; None if unknown.
        """
        sent = [request for request in live if request.is_sent]
        ran = [each for each in sent if started is None or each.num_new_tokens or each.rid in started]
        for request in sent:
            request.is_sent = False
        stuck = []
        for request in ran or sent:
            if request.num_new_tokens < MIN_PROGRESS_TOKENS:
                stuck.append(request)
            else:
                request.num_crashes = 0
        quarantined = [request for request in stuck if request in self._running]
        for request in quarantined or stuck:
            request.num_crashes += 1
            self._suspects.append(request)

    def isolate(self, live: Iterable[LoggedRequest], restarts_left: int, now_s: float) -> list[LoggedRequest]:
        """The poison requests of the last loss; all choices of one generation. Other suspects are quarantined.

        Args:
            live: all requests.
            restarts_left: further losses that the server survives.
            now_s: the time.
        """
        self._restarts_left = restarts_left
        self._group_began_s = now_s  # the running group is submitted again
        suspects = [each for each in self._suspects if each.num_crashes >= _MAX_CRASHES]
        self._suspects = []
        alive = set(live)
        left = [each for each in suspects if each in alive]
        # A suspect that ended meanwhile may have been the cause: the only one left is then not proven to be it.
        if len({request.generation for request in suspects}) == 1:
            self._release()
            return left
        if left:
            others = {request: None for request in self._running if request not in left}  # had not started
            self._waiting += [each for each in (others, dict.fromkeys(left)) if each]
            self._running = {}
            self._take_group(now_s)
        return []

    def to_submit(self, live: Iterable[LoggedRequest]) -> list[LoggedRequest]:
        """The live requests that a new process gets now: all but the waiting ones of the quarantine."""
        waiting = {request for each in self._waiting for request in each}
        return [request for request in live if request not in waiting]

    def next_group(self, request: LoggedRequest, now_s: float, *, ended: bool) -> list[LoggedRequest]:
        """The requests to submit now that `request` has new tokens, or has ended."""
        if ended:
            for each in self._waiting:
                each.pop(request, None)
            self._waiting = [each for each in self._waiting if each]
        if request not in self._running or not (ended or request.num_new_tokens >= MIN_PROGRESS_TOKENS):
            return []
        request.num_crashes = 0
        del self._running[request]
        return [] if self._running else self._take_group(now_s)

    def overdue_group(self, now_s: float) -> list[LoggedRequest]:
        """The requests to submit now because the running group has taken longer than `MAX_GROUP_S`."""
        if not self._waiting or now_s - self._group_began_s <= MAX_GROUP_S:
            return []
        return self._take_group(now_s)

    def _take_group(self, now_s: float) -> list[LoggedRequest]:
        """The next group; the choices of a generation stay together, since one error fails all of them."""
        if not self._waiting:
            return []
        suspects = self._waiting[-1]
        generations = list(dict.fromkeys(request.generation for request in suspects))
        num_running = len({request.generation for request in self._running})
        chosen = set(generations[: max(group_size(len(generations), self._restarts_left), num_running)])
        group = [request for request in suspects if request.generation in chosen]
        for request in group:
            del suspects[request]
        if not suspects:
            self._waiting.pop()
        self._running |= dict.fromkeys(group)
        self._group_began_s = now_s
        return group

    def _release(self) -> None:
        """End the quarantine: the cause is found. A second cause makes its requests suspect at the next loss."""
        for each in (self._running, *self._waiting):
            for request in each:
                request.num_crashes = min(request.num_crashes, _MAX_CRASHES - 1)
        self._running, self._waiting = {}, []


def group_size(num: int, num_losses: int) -> int:
    """How many of `num` suspects a group has, so that `num_losses` more losses find the poison request."""
    num_groups = math.ceil(math.pow(num, 1.0 / max(num_losses, 1)) - 1e-9)
    return math.ceil(num / min(max(num_groups, 2), _MAX_GROUPS))
