"""`EventLoop`: the main loop of the scheduler process: receive messages, advance one step, send outputs.

Only this class uses the sockets, the supervisor and the clock. The `Pipeline` plans, launches and settles the steps,
and decides whether the next step is planned while the device computes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from msgspec.structs import replace

from ..launch.child.child import Child
from ..runtime.messages import HEARTBEAT_INTERVAL_S, SchedulerInput
from ..runtime.step_plan import Runner
from ..runtime.transport.ipc import Inbox, Outbox
from .adapters.adapter_table import AdapterReader
from .grammar.grammar_builder import GrammarBuilder
from .journal.recorder import Recorder
from .kv_events.publisher import KVEvents
from .pipeline import Pipeline
from .records.decision_log import PassRecord
from .records.stats import StepLog
from .scheduler import Scheduler

logger = logging.getLogger(__name__)

PREPARING_POLL_S: Final = 1e-3
"""While a grammar is compiled or an adapter read, and there is nothing else to do, the loop polls this often whether it
is ready."""


class KVThread(Protocol):
    """Moves KV as the scheduler orders, beside the loop: a `LinkThread`, or a `PageMover`."""

    def send(self, commands: Sequence[Any]) -> None:
        """Hand the scheduler's commands to the thread; never blocks."""
        ...

    def close(self, timeout_s: float = ...) -> None:
        """End the thread, and wait so long for it."""
        ...


class EventLoop:
    """Connects one scheduler and its runner to the other processes."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        inbox: Inbox[SchedulerInput],
        outbox: Outbox,
        manager: Outbox,
        child: Child,
        step_log: StepLog,
        clock: Callable[[], float] = time.monotonic,
        recorder: Recorder | None = None,
        *,
        idle_work: Callable[[int], bool],
        overlap: bool = False,
        grammars: GrammarBuilder | None = None,
        adapters: AdapterReader | None = None,
        kv_events: KVEvents | None = None,
        transfer: KVThread | None = None,
        drain_timeout_s: float = 0.0,
        replica: int = 0,
    ) -> None:
        """Take the parts.

        Args:
            outbox: to the detokenizer.
            manager: to the tokenizer manager, for the answers to calls.
            clock: CLOCK_MONOTONIC, which all processes of the engine share.
            idle_work: called while there are no requests, with the highest page used so far. It does some milliseconds
                of work for later steps and returns whether there is more to do.
            overlap, grammars, adapters: see `Pipeline`.
            kv_events: publishes changes of the prefix cache, which the scheduler records; None: nothing does.
            transfer: moves KV between engines, or to and from a disk; None: nothing does.
            drain_timeout_s: time that the last commands of the scheduler may take when the engine stops in good order.
            replica: the scheduler's number, for its reports.
        """
        self._drain_timeout_s = drain_timeout_s
        self._scheduler = scheduler
        self._inbox = inbox
        self._outbox = outbox
        self._manager = manager
        self._child = child
        self._step_log = step_log
        self._clock = clock
        self._recorder = recorder if recorder is not None else Recorder()
        self._pipeline = Pipeline(
            scheduler, runner, self._recorder, clock, overlap=overlap, grammars=grammars, adapters=adapters
        )
        self._replica = replica
        self._idle_work = idle_work
        self._kv_events = kv_events if kv_events is not None else KVEvents()
        self._transfer = transfer
        self._idle = False
        self._has_idle_work = False
        self._num_decisions = 0  # already logged
        self._next_report_s = clock()

    def handle(self, message: SchedulerInput) -> None:
        """Take a message of this process's own."""
        self._pipeline.handle(message)

    def finish_reads(self) -> None:
        self._pipeline.finish_reads()

    def run(self) -> None:
        """Loop until the supervisor requests a stop."""
        try:
            while not self._child.stop_requested():
                self.step()
            if self._transfer is not None and self._child.stops_in_order:
                self._transfer.send(self._scheduler.close())
                self._transfer.close(self._drain_timeout_s)
                self._transfer = None
        finally:
            self._recorder.close()
            self._kv_events.close()
            if self._transfer is not None:
                self._transfer.close()

    def step(self) -> None:
        """One iteration: take messages, advance the steps, send the outputs, send heartbeat and report.

        Without requests the loop does idle work. When that is done it waits for a message, at most until the next
        report or until `Scheduler.wake_s`. While a step is in flight it never waits for messages.
        """
        messages = self._inbox.poll(self._wait_s())
        for message in messages:
            self._pipeline.handle(message)
        advanced = self._pipeline.advance(self._inbox.has_message)
        if logger.isEnabledFor(logging.DEBUG):
            self._log_decisions()
        else:  # if the level changes to DEBUG later, old decisions must not be logged
            self._num_decisions = self._scheduler.decisions.num_records
        if advanced:
            self._idle = False
        elif messages or not self._idle or self._scheduler.num_unfinished:
            self._pipeline.idle()
            self._idle = True
            self._has_idle_work = not self._scheduler.num_unfinished
        elif self._has_idle_work:
            self._has_idle_work = self._idle_work(self._scheduler.highest_used_page)
        for output in self._scheduler.take_outputs():
            self._outbox.send(output)
        for done in self._scheduler.take_call_answers():
            self._manager.send(replace(done, replica=self._replica))
        # After `advance`, which has waited for all steps that were launched before a page could be claimed: no step in
        # flight writes to a page that another engine or a disk may write to from now on.
        if self._transfer is not None:
            self._transfer.send(self._scheduler.take_transfer_commands())
        # After the tokens, for which clients wait.
        self._kv_events.publish(self._scheduler.take_block_events(), self._scheduler.adapter)
        self._show_signs_of_life()

    def _wait_s(self) -> float:
        """Seconds to wait for messages before the next iteration."""
        if not self._idle or self._has_idle_work:
            return 0.0
        if self._pipeline.is_preparing:
            return PREPARING_POLL_S
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
        """Send heartbeat and report, on time also under load."""
        self._child.heartbeat()
        now_s = self._clock()
        if now_s >= self._next_report_s:
            self._next_report_s = now_s + HEARTBEAT_INTERVAL_S
            report = self._pipeline.report(now_s)
            totals = replace(
                report.totals,
                kv_events=self._kv_events.num_events,
                kv_event_replays=self._kv_events.num_replays,
            )
            report = replace(report, totals=totals, replica=self._replica)
            self._outbox.send(report)
            self._step_log.note(report)
