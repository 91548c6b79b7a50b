"""`EventLoop`: the scheduler's process in motion: messages in, one step, outputs out, again and again.

It is the only caller of `Scheduler` in the server and the only one that knows sockets and the clock. Here
the device is waited for in each pass; overlapping its work with planning is another loop with the same
parts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ..runtime.child import Child
from ..runtime.ipc import Inbox, Outbox
from ..runtime.messages import HEARTBEAT_INTERVAL_S, SchedulerInput
from ..runtime.step_plan import Runner
from .decision_log import PassRecord
from .recorder import NoRecorder, Recorder
from .scheduler import Scheduler
from .step_log import StepLog

logger = logging.getLogger(__name__)


class EventLoop:
    """One scheduler, its runner, and its connections."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        inbox: Inbox[SchedulerInput],
        outbox: Outbox,
        child: Child,
        step_log: StepLog,
        clock: Callable[[], float] = time.monotonic,
        recorder: Recorder | None = None,
    ) -> None:
        """Take the parts; `clock` is CLOCK_MONOTONIC, which all processes of the engine share."""
        self._scheduler = scheduler
        self._runner = runner
        self._inbox = inbox
        self._outbox = outbox
        self._child = child
        self._step_log = step_log
        self._clock = clock
        self._recorder: Recorder = recorder if recorder is not None else NoRecorder()
        self._idle = False
        self._num_decisions = 0  # already logged
        self._next_report_s = clock()

    def run(self) -> None:
        """Go round until the supervisor says stop."""
        try:
            while not self._child.stop_requested():
                self.step()
        finally:
            self._recorder.close()

    def step(self) -> None:
        """One pass: take messages, run a step if there is one, send what came of it, show signs of life.

        Without work it waits for a message, but not beyond the next report, nor beyond the time at which the
        scheduler may decide something without one.
        """
        messages = self._inbox.poll(self._wait_s())
        for message in messages:
            now_s = self._clock()
            self._recorder.received(message, now_s)
            self._scheduler.handle(message, now_s)

        now_s = self._clock()
        self._recorder.planning(now_s)
        batch = self._scheduler.next_batch(now_s)
        self._recorder.planned(batch)
        if logger.isEnabledFor(logging.DEBUG):
            self._log_decisions()
        if batch is not None:
            result = self._runner.launch(batch.plan).wait()
            self._scheduler.settle(batch, result, self._clock())
            self._recorder.settled()
            self._idle = False
        elif messages or not self._idle or self._scheduler.num_unfinished:
            self._recorder.idle(now_s)
            self._scheduler.on_idle()
            self._idle = True
        for output in self._scheduler.take_outputs():
            self._outbox.send(output)
        self._show_signs_of_life()

    def _wait_s(self) -> float:
        """Seconds to wait for messages before the next pass."""
        if not self._idle:
            return 0.0
        until_s = self._next_report_s
        wake_s = self._scheduler.wake_s()
        if wake_s is not None:
            until_s = min(until_s, wake_s)
        return max(0.0, until_s - self._clock())

    def _log_decisions(self) -> None:
        decisions = self._scheduler.decisions
        for record in decisions.since(self._num_decisions):
            if isinstance(record, PassRecord):
                for line in record.lines():
                    logger.debug("%s", line)
        self._num_decisions = decisions.num_records

    def _show_signs_of_life(self) -> None:
        """Heartbeat and report, on time also under load."""
        self._child.heartbeat()
        now_s = self._clock()
        if now_s >= self._next_report_s:
            self._next_report_s = now_s + HEARTBEAT_INTERVAL_S
            report = self._scheduler.report(now_s)
            self._outbox.send(report)
            self._step_log.note(report)
