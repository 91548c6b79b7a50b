"""`record`: a harness whose calls of the scheduler are written to a decision log."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.runtime.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from engine.runtime.config.server_config import LogConfig
from engine.runtime.messages import SchedulerInput
from engine.runtime.step_plan import StepResult
from engine.scheduler.batch import ScheduleBatch
from engine.scheduler.journal.recorder import Recorder, make_recorder
from engine.scheduler.records.decision_log import RefusedToken
from engine.scheduler.scheduler import Scheduler
from tests.scheduler.harness import Harness

SCHEDULER_FIELDS = {field.name for field in dataclasses.fields(SchedulerConfig)}


class RecordedCalls:
    """Stands where a scheduler stands, and tells a recorder of the calls that change it."""

    def __init__(self, scheduler: Scheduler, recorder: Recorder) -> None:
        self.scheduler = scheduler
        self.recorder = recorder
        self.now_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def handle(self, message: SchedulerInput, now_s: float) -> None:
        self.recorder.received(message, now_s)
        self.scheduler.handle(message, now_s)

    def next_batch(self, now_s: float) -> ScheduleBatch | None:
        self.now_s = now_s
        self.recorder.planning(now_s)
        batch = self.scheduler.next_batch(now_s)
        self.recorder.planned(batch)
        return batch

    def settle(
        self, batch: ScheduleBatch, result: StepResult, now_s: float, refused: Sequence[RefusedToken] = ()
    ) -> None:
        self.scheduler.settle(batch, result, now_s, refused)
        self.recorder.settled()

    def on_idle(self) -> None:
        self.recorder.idle(self.now_s)
        self.scheduler.on_idle()


def record(path: Path, *, kind: type[Harness] = Harness, **settings: Any) -> Harness:
    """A harness as `kind(**settings)`; the log is complete after `finish(harness)`."""
    settings.setdefault("chunked_prefill_size", 64)
    harness = kind(**settings)
    scheduler = {name: value for name, value in settings.items() if name in SCHEDULER_FIELDS}
    scheduler["overlap"] = bool(settings.get("overlap", 0))  # the harness's own is a number of steps
    config = EngineConfig(
        scheduler=SchedulerConfig(**scheduler),
        cache=CacheConfig(radix_cache=settings.get("radix_cache", True), **settings.get("cache", {})),
        log=LogConfig(decision_log=str(path)),
    )
    recorder = make_recorder(
        config, harness.capacity, harness.eos, harness.scheduler, wall_s=1e9, now_s=harness.now_s
    )
    harness.scheduler = RecordedCalls(harness.scheduler, recorder)  # type: ignore[assignment]
    return harness


def finish(harness: Harness) -> None:
    """Close the log."""
    calls = harness.scheduler
    assert isinstance(calls, RecordedCalls)
    calls.recorder.close()


def scheduler_of(harness: Harness) -> Scheduler:
    """The scheduler itself."""
    calls = harness.scheduler
    assert isinstance(calls, RecordedCalls)
    return calls.scheduler
