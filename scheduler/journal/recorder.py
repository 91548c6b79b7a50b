"""`Recorder`: records every call of the `Scheduler`, in order; the caller of the scheduler also calls the recorder.

`Recorder` itself does nothing. `FileRecorder` writes the calls, and the decisions of each, to a decision log. The calls
in a loop:

    recorder.received(message, now_s);  scheduler.handle(message, now_s)
    recorder.planning(now_s);           batch = scheduler.next_batch(now_s);  recorder.planned(batch)
                                        scheduler.settle(batch, result, now_s);  recorder.settled()
    recorder.idle(now_s);               scheduler.on_idle()
"""

from __future__ import annotations

from ...runtime.config.engine_config import EngineConfig
from ...runtime.feasibility import Capacity
from ...runtime.messages import Call, Question, SchedulerInput
from ..batch import ScheduleBatch
from ..scheduler import Scheduler
from .log_file import Idle, Input, LogRecord, Planning
from .log_writer import LogWriter, header_of


class Recorder:
    """See the module. This base records nothing."""

    def received(self, message: SchedulerInput, now_s: float) -> None:
        """`handle` is about to be called."""

    def planning(self, now_s: float) -> None:
        """`next_batch` is about to be called."""

    def planned(self, batch: ScheduleBatch | None) -> None:
        """`next_batch` has returned `batch`; the record of the pass survives a crash from now on."""

    def settled(self) -> None:
        """`settle` has returned."""

    def idle(self, now_s: float) -> None:
        """`on_idle` is about to be called."""

    def close(self) -> None:
        """No call will follow, or one of them raised."""


class FileRecorder(Recorder):
    """Writes a run of a decision log: one write per pass."""

    def __init__(self, scheduler: Scheduler, writer: LogWriter) -> None:
        """`scheduler` must be new: earlier decisions are not in the file."""
        self._scheduler = scheduler
        self._writer = writer
        self._num_written = scheduler.decisions.num_records
        self._planning_s: float | None = None  # time of a call that has not returned
        self._quiet_s: float | None = None  # time of the last call that was not written

    def received(self, message: SchedulerInput, now_s: float) -> None:
        self._write_decisions()
        if not (isinstance(message, Call) and isinstance(message.request, Question)):
            self._write(Input(now_s, message))

    def planning(self, now_s: float) -> None:
        self._write_decisions()
        self._planning_s = now_s

    def planned(self, batch: ScheduleBatch | None) -> None:
        decided = self._scheduler.decisions.num_records > self._num_written
        if decided or batch is not None or self._scheduler.num_unfinished:
            self._write_planning()
            self._write_decisions()
            self._writer.flush()
        else:
            # An idle server makes many passes a minute. The last one alone has the same effect (pins expire).
            self._planning_s, self._quiet_s = None, self._planning_s

    def settled(self) -> None:
        self._write_decisions()

    def idle(self, now_s: float) -> None:
        self._write_decisions()
        self._write(Idle(now_s))
        self._writer.flush()

    def close(self) -> None:
        # If a call raised, it is the last one in the log, so that a replay ends with the same error.
        self._write_planning()
        self._write_decisions()
        self._writer.close()

    def _write_planning(self) -> None:
        if self._planning_s is not None:
            self._write(Planning(self._planning_s))
            self._planning_s = None

    def _write_decisions(self) -> None:
        decisions = self._scheduler.decisions
        if decisions.num_records > self._num_written:
            for record in decisions.since(self._num_written):
                self._write(record)
            self._num_written = decisions.num_records

    def _write(self, record: LogRecord) -> None:
        if self._quiet_s is not None:
            self._writer.add(Planning(self._quiet_s))
            self._quiet_s = None
        self._writer.add(record)


def open_log(config: EngineConfig) -> LogWriter | None:
    """Open the file that `--decision-log` names; None without one. The run begins later, with `LogWriter.begin`.

    Raises:
        ConfigError: the file cannot be written; see `LogWriter`.
    """
    return None if config.log.decision_log is None else LogWriter(config.log.decision_log)


def make_recorder(
    config: EngineConfig,
    capacity: Capacity,
    eos_token_ids: frozenset[int],
    scheduler: Scheduler,
    *,
    wall_s: float,
    now_s: float,
    log: LogWriter | None = None,
) -> Recorder:
    """The recorder that `--decision-log` asks for.

    Args:
        capacity, eos_token_ids: arguments with which the scheduler was made.
        log: the result of `open_log`; if None, `open_log` is called now.

    Raises:
        ConfigError: the file cannot be written; see `LogWriter`.
    """
    log = log if log is not None else open_log(config)
    if log is None:
        return Recorder()
    log.begin(header_of(config, capacity, eos_token_ids, wall_s=wall_s, now_s=now_s))
    return FileRecorder(scheduler, log)
