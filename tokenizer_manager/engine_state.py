"""`EngineState`: what the tokenizer manager knows of the scheduler and the detokenizer, and which calls it permits."""

from __future__ import annotations

from collections.abc import Callable

from ..runtime.errors import EngineDeadError, RequestError
from ..runtime.feasibility import Capacity
from ..runtime.messages import SchedulerReport


class EngineState:
    """The state of one engine's processes. The manager writes it, except for `lost_reason`, which `Recovery` writes.

    Attributes:
        capacity: of the running scheduler.
        report: the latest one of the scheduler; None before the first.
        draining: no new requests are accepted.
        lost_reason: why there is no scheduler or no detokenizer at present; None while both run.
    """

    def __init__(self, capacity: Capacity, watchdog_timeout_s: float, clock: Callable[[], float]) -> None:
        """Start with a running engine.

        Args:
            capacity: of the scheduler. Receiving it counts as the first heartbeat.
            watchdog_timeout_s: a scheduler without a report for longer than this is unhealthy.
            clock: CLOCK_MONOTONIC.
        """
        self.capacity = capacity
        self.report: SchedulerReport | None = None
        self.draining = False
        self.lost_reason: str | None = None
        self._watchdog_timeout_s = watchdog_timeout_s
        self._clock = clock
        self._started_s = clock()
        self._death: str | None = None  # not the error: raising one object twice keeps every traceback alive

    @property
    def is_dead(self) -> bool:
        """Whether the engine is lost for good."""
        return self._death is not None

    def restarted(self, capacity: Capacity) -> None:
        """A new scheduler runs; reports of the one before it are no heartbeat of this one."""
        self.capacity = capacity
        self._started_s = self._clock()

    def died(self, message: str) -> None:
        """The engine is lost for good, for the reason in `message`."""
        self._death = message

    def check_accepting(self) -> None:
        """Raise if new requests are refused. While processes restart they are accepted.

        Raises:
            EngineDeadError: the engine is dead.
            RequestError: the server is draining.
        """
        self._check_alive()
        if self.draining:
            raise RequestError(
                "the server is shutting down; retry elsewhere", code="shutting_down", status=503
            )

    def check_answering(self) -> None:
        """Raise if the scheduler cannot answer a call now.

        Raises:
            EngineDeadError: the engine is dead, or a process of it is being restarted.
        """
        self._check_alive()
        if self.lost_reason is not None:
            raise EngineDeadError(self.lost_reason)

    def unhealthy_reason(self) -> str | None:
        """Why a router should send requests elsewhere now; None for a healthy engine."""
        if self._death is not None:
            return self._death
        if self.draining:
            return "the server is shutting down"
        if self.lost_reason is not None:
            return self.lost_reason
        report = self.report if self.report is not None and self.report.sent_s >= self._started_s else None
        age_s = self._clock() - (self._started_s if report is None else report.sent_s)
        if age_s > self._watchdog_timeout_s:
            return f"the scheduler's last heartbeat is {age_s:.1f} s old, the limit is {self._watchdog_timeout_s:g} s"
        if report is not None and report.stalled:
            return f"requests wait and nothing moves: {report.stalled}"
        return None

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)
