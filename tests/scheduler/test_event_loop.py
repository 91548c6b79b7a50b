"""The event loop with a clock, sockets and a control channel made of lists; scheduler real, runner fake."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from engine.launch.child.child import Child
from engine.runtime.messages import (
    HEARTBEAT_INTERVAL_S,
    AbortRequest,
    BatchTokenOutput,
    Call,
    CallDone,
    FinishKind,
    FlushCache,
    FlushCacheDone,
    GenerateRequest,
    SchedulerInput,
)
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.scheduler_report import SchedulerReport
from engine.runtime.step_plan import GetMasks, GoOn, StepPlan, no_masks, to_the_end
from engine.runtime.transport.ipc import Inbox, Outbox
from engine.runtime.transport.message_base import Message
from engine.scheduler.event_loop import EventLoop
from engine.scheduler.journal.log_file import read_runs
from engine.scheduler.journal.log_writer import LogWriter
from engine.scheduler.journal.recorder import FileRecorder, Recorder
from engine.scheduler.journal.replay import replay
from engine.scheduler.kv_events.publisher import AdapterOf, KVEvents
from engine.scheduler.prefix_cache.block_events import AllBlocksCleared, BlockEvent, BlocksStored
from engine.scheduler.records.decision_log import KEPT_RECORDS, Arrived, PassRecord
from engine.scheduler.records.stats import StepLog

from .journal.log_samples import sample_header

STEP_S = 0.125


class World:
    """Everything around the event loop. Time passes in polls that wait, and in steps of the runner."""

    def __init__(
        self,
        harness: Any,
        log_interval_s: float = 10.0,
        recorder: Recorder | None = None,
        *,
        overlap: bool = False,
        num_preparations: int = 0,
        kv_events: KVEvents | None = None,
    ) -> None:
        self.now_s = 50.0
        self.num_preparations = num_preparations  # left
        self.prepared_at: list[tuple[int, int]] = []  # requests there were, the highest page so far
        self.arriving: list[SchedulerInput] = []
        self.sent: list[Message] = []
        self.answered: list[Message] = []  # to the tokenizer manager
        self.waits_s: list[float] = []
        self.num_heartbeats = 0
        self.stops_after: int | None = None
        self.scheduler = harness.scheduler
        self._runner = harness.runner
        self.loop = EventLoop(
            harness.scheduler,
            self,
            cast("Inbox[SchedulerInput]", self),
            cast(Outbox, self),
            cast(Outbox, SimpleNamespace(send=self.answered.append)),
            cast(Child, self),
            StepLog(log_interval_s),
            clock=lambda: self.now_s,
            recorder=recorder,
            overlap=overlap,
            idle_work=self.idle_work,
            kv_events=kv_events,
        )

    def idle_work(self, highest_page: int) -> bool:
        self.prepared_at.append((self.scheduler.num_unfinished, highest_page))
        self.num_preparations -= 1
        return self.num_preparations > 0

    def poll(self, timeout_s: float) -> list[SchedulerInput]:
        self.waits_s.append(timeout_s)
        messages, self.arriving = self.arriving, []
        if not messages:
            self.now_s += timeout_s
        return messages

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def has_message(self) -> bool:
        return bool(self.arriving)

    def launch(self, plan: StepPlan, go_on: GoOn = to_the_end, masks: GetMasks = no_masks) -> Any:
        self.now_s += STEP_S
        return self._runner.launch(plan, go_on, masks)

    def heartbeat(self) -> None:
        self.num_heartbeats += 1

    def stop_requested(self) -> bool:
        return self.num_heartbeats == self.stops_after

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.loop.step()

    def submit(self, rid: str, max_new_tokens: int, **fields: Any) -> None:
        sampling = SamplingParams(max_new_tokens=max_new_tokens, seed=1, ignore_eos=True)
        ids = np.arange(1, 9, dtype=np.int32).tobytes()
        self.arriving.append(GenerateRequest(rid, ids, sampling, self.now_s, **fields))

    def sent_of(self, kind: type[Message]) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]

    @property
    def rows(self) -> list[Any]:
        return [row for batch in self.sent_of(BatchTokenOutput) for row in batch.outputs]


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def overlap(request: pytest.FixtureRequest) -> bool:
    value: bool = request.param
    return value


@pytest.fixture
def world(make_scheduler, overlap) -> World:
    return World(make_scheduler(), overlap=overlap)


def test_a_request_is_answered_token_by_token_and_once(world):
    world.submit("r1", max_new_tokens=4)

    world.steps(6)

    assert [len(row.token_ids) // 4 for row in world.rows] == [1, 1, 1, 1]
    assert [row.finish and row.finish.kind for row in world.rows] == [None, None, None, FinishKind.LENGTH]


def test_messages_are_taken_between_steps(world, overlap):
    world.submit("long", max_new_tokens=100)
    world.steps(3)
    world.submit("late", max_new_tokens=1)
    world.steps(1)
    world.arriving.append(AbortRequest("long", "client disconnected"))
    world.steps(1)

    rids = [row.rid for row in world.rows]
    # Overlapped, the step with the late one is settled in the pass of the abort, behind it.
    assert rids == ["long", "long", "long", *(["long", "late"] if overlap else ["late", "long", "long"])]
    (finish,) = [row.finish for row in world.rows if row.rid == "long" and row.finish]
    assert finish.kind is FinishKind.ABORT


def test_a_message_ends_a_burst(make_scheduler):
    harness = make_scheduler(multi_step_ms=1e6)
    world = World(harness)
    world.submit("long", max_new_tokens=60)
    world.steps(3)
    num_before = len(world.rows[-1].token_ids) // 4

    def seconds(plan: StepPlan) -> float:
        """Somebody comes while the second round is computed."""
        if harness.runner.rows and (round_of := len(rounds)) < 2:
            rounds.append(round_of)
            if round_of == 1:
                world.submit("late", max_new_tokens=1)
        return 0.01

    rounds: list[int] = []
    harness.runner.step_s = seconds
    world.steps(2)

    rows = [(row.rid, len(row.token_ids) // 4) for row in world.rows][-3:]
    assert num_before == 8
    assert rows == [("long", 2), ("late", 1), ("long", 1)]


def test_a_flush_is_answered_while_idle(world):
    world.arriving.append(Call(7, FlushCache()))

    world.steps(1)

    assert world.answered == [CallDone(7, FlushCacheDone(0, 0))]


class ListedEvents(KVEvents):
    """A publisher that keeps what it gets, with the name of the adapter."""

    def __init__(self) -> None:
        self.published: list[tuple[BlockEvent, str]] = []
        self.is_closed = False

    @property
    def num_events(self) -> int:
        return len(self.published)

    @property
    def num_replays(self) -> int:
        return 3

    def publish(self, events: Sequence[BlockEvent], adapter_of: AdapterOf) -> None:
        for event in events:
            adapter = adapter_of(event.lora_id) if isinstance(event, BlocksStored) else None
            self.published.append((event, "" if adapter is None else adapter.name))

    def close(self) -> None:
        self.is_closed = True


def test_what_the_prefix_cache_stores_is_published(make_scheduler, overlap):
    harness, kv_events = make_scheduler(records_blocks=True), ListedEvents()
    store_id = harness.load_adapter("fingerprint")
    world = World(harness, overlap=overlap, kv_events=kv_events)
    world.submit("plain", max_new_tokens=12)  # 8 + 12 tokens: one block of 16
    world.submit("adapted", max_new_tokens=12, lora_id="fingerprint")
    world.steps(20)
    stored = [(event, name) for event, name in kv_events.published if isinstance(event, BlocksStored)]

    world.arriving.append(Call(1, FlushCache()))
    world.steps(1)
    world.stops_after = world.num_heartbeats
    world.loop.run()

    assert store_id
    assert [(event.lora_id, name) for event, name in stored] == [
        ("", ""),
        ("fingerprint", "name of fingerprint"),
    ]
    assert kv_events.published[-1] == (AllBlocksCleared(), "")
    assert kv_events.is_closed


def test_figures_of_kv_events_are_reported(make_scheduler):
    kv_events = ListedEvents()
    world = World(make_scheduler(records_blocks=True), kv_events=kv_events)
    world.submit("r", max_new_tokens=12)

    while not world.sent_of(SchedulerReport) or not world.sent_of(SchedulerReport)[-1].totals.kv_events:
        world.steps(1)

    report = world.sent_of(SchedulerReport)[-1]
    assert (report.totals.kv_events, report.totals.kv_event_replays) == (kv_events.num_events, 3)


def test_idle_it_waits_for_messages_and_wakes_only_to_report(world):
    world.steps(3)
    started_s, world.waits_s = world.now_s, []

    world.steps(20)

    assert min(world.waits_s) > 0
    assert world.now_s - started_s >= 19 * HEARTBEAT_INTERVAL_S


def test_busy_it_never_waits(world):
    world.submit("r1", max_new_tokens=10)

    world.steps(10)

    assert world.waits_s == [0.0] * 10


def test_what_an_answer_waits_for_is_sent_before_the_loop_waits(make_scheduler):
    """The tokens of the last step in flight are out, and the books are checked, before it waits for messages."""
    world = World(make_scheduler(), overlap=True)
    world.submit("r1", max_new_tokens=3)

    while not world.waits_s or world.waits_s[-1] == 0.0:
        world.steps(1)

    assert [row.finish and row.finish.kind for row in world.rows] == [None, None, FinishKind.LENGTH]
    assert world.scheduler.num_unfinished == 0
    assert len(world.waits_s) < 10


@pytest.mark.parametrize("max_new_tokens", [100, 0], ids=["busy", "idle"])
def test_reports_come_on_time(world, max_new_tokens):
    if max_new_tokens:
        world.submit("r1", max_new_tokens=max_new_tokens)

    world.steps(60)

    times_s = [report.sent_s for report in world.sent_of(SchedulerReport)]
    assert len(times_s) > 10
    assert max(np.diff(times_s)) <= HEARTBEAT_INTERVAL_S + STEP_S
    assert world.num_heartbeats == 60


def test_the_books_are_checked_once_when_work_is_done(make_scheduler, monkeypatch, overlap):
    harness = make_scheduler()
    checks = []
    monkeypatch.setattr(harness.scheduler, "on_idle", lambda: checks.append(1))
    world = World(harness, overlap=overlap)
    world.steps(5)
    at_start = len(checks)

    world.submit("r1", max_new_tokens=3)
    world.steps(10)

    assert (at_start, len(checks)) == (1, 2)


def test_a_bug_found_by_the_scheduler_ends_the_loop(make_scheduler, monkeypatch):
    harness = make_scheduler()

    def fail(*_args: object) -> None:
        raise AssertionError("a page is missing")

    monkeypatch.setattr(harness.scheduler, "on_idle", fail)

    with pytest.raises(AssertionError, match="a page is missing"):
        World(harness).loop.run()


def test_runs_until_the_supervisor_says_stop(world):
    world.stops_after = 7

    world.loop.run()

    assert world.num_heartbeats == 7


def test_one_line_per_interval_and_none_without_work(make_scheduler, caplog):
    caplog.set_level(logging.INFO, logger="engine.scheduler.records.stats")
    world = World(make_scheduler(), log_interval_s=2.0)
    world.steps(20)
    assert caplog.messages == []

    world.submit("r1", max_new_tokens=40)
    world.steps(60)

    lines = caplog.messages
    assert 2 <= len(lines) <= 4
    assert all("running=" in line and "cache_hit=" in line for line in lines)
    steps = [int(line.split()[0].removeprefix("steps=")) for line in lines]
    assert sum(steps) == 40


def test_verdicts_are_logged_for_those_who_debug(make_scheduler, caplog):
    caplog.set_level(logging.DEBUG, logger="engine.scheduler.event_loop")
    world = World(make_scheduler(max_running_requests=1))
    world.submit("r1", max_new_tokens=2)
    world.submit("r2", max_new_tokens=1)

    world.steps(6)

    assert caplog.messages == [
        "step=1 mode=EXTEND decodes=0 waiting=2 evicted_pages=0 retracted=-",
        "step=1 ADMITTED_ALONE r1: admitted, since nothing else runs and its worst case fits; need 12 have 256 "
        "(cached 0, compute 8, output 2)",
        "step=1 NO_ROW 1 others: the limit of running requests is reached",
        "step=2 mode=DECODE decodes=1 waiting=1 evicted_pages=0 retracted=-",
        "step=2 NO_ROW 1 others: the limit of running requests is reached",
        "step=3 mode=EXTEND decodes=0 waiting=1 evicted_pages=0 retracted=-",
        "step=3 ADMITTED_ALONE r2: admitted, since nothing else runs and its worst case fits; need 4 have 252 "
        "(cached 4, compute 4, output 1)",
    ]


def test_who_begins_to_debug_later_gets_no_old_verdicts(make_scheduler, caplog):
    world = World(make_scheduler(max_running_requests=1))
    world.submit("r1", max_new_tokens=4)
    caplog.set_level(logging.INFO, logger="engine.scheduler.event_loop")
    world.steps(2)
    caplog.set_level(logging.DEBUG, logger="engine.scheduler.event_loop")
    world.steps(1)

    assert caplog.messages == ["step=3 mode=DECODE decodes=1 waiting=0 evicted_pages=0 retracted=-"]


def test_nothing_is_formatted_for_those_who_do_not(world, monkeypatch):
    monkeypatch.setattr(PassRecord, "lines", lambda record: pytest.fail("a line was made that nobody reads"))
    world.submit("r1", max_new_tokens=2)

    world.steps(4)

    assert any(isinstance(record, PassRecord) for record in world.scheduler.decisions)
    assert world.scheduler.num_unfinished == 0


def test_an_idle_loop_remembers_what_it_has_decided(world):
    world.submit("r1", max_new_tokens=2)

    world.steps(KEPT_RECORDS + 100)

    kinds = [type(record) for record in world.scheduler.decisions]
    assert kinds[:2] == [Arrived, PassRecord]
    assert kinds.count(PassRecord) == 2
    assert len(kinds) < 10


def test_the_books_are_checked_again_after_a_message_while_idle(make_scheduler, monkeypatch):
    harness = make_scheduler()
    checks = []
    monkeypatch.setattr(harness.scheduler, "on_idle", lambda: checks.append(1))
    world = World(harness)
    world.steps(3)
    world.arriving.append(Call(1, FlushCache()))
    world.steps(3)

    assert len(checks) == 2


def test_it_wakes_up_for_a_deadline(world):
    world.submit("r1", max_new_tokens=5, needs_grammar=True, queue_timeout_s=0.2)
    start_s = world.now_s

    world.steps(2)

    (row,) = world.rows
    assert row.finish.status == 503
    assert world.now_s - start_s < HEARTBEAT_INTERVAL_S
    assert world.waits_s[1] == pytest.approx(0.2)


def test_it_wakes_up_when_the_policy_has_waited_long_enough(make_scheduler):
    world = World(make_scheduler(schedule_policy="static", static_batch_size=4, static_batch_wait=0.3))
    world.submit("r1", max_new_tokens=1)
    start_s = world.now_s

    world.steps(4)

    assert [row.rid for row in world.rows] == ["r1"]
    assert world.now_s - start_s == pytest.approx(0.3 + 2 * STEP_S, abs=0.01)


def test_while_requests_wait_each_fruitless_pass_is_noticed(make_scheduler, monkeypatch):
    harness = make_scheduler()
    checks = []
    monkeypatch.setattr(harness.scheduler, "on_idle", lambda: checks.append(1))
    world = World(harness)
    world.submit("r1", max_new_tokens=1, needs_grammar=True)

    world.steps(5)

    assert len(checks) == 5


def test_what_the_loop_did_can_be_replayed(make_scheduler, tmp_path, overlap):
    harness = make_scheduler(max_running_requests=2)
    header = sample_header()
    header.capacity = harness.capacity
    header.scheduler["chunked_prefill_size"] = 64
    header.eos_token_ids = sorted(harness.eos)
    path = tmp_path / "decisions.log"
    recorder = FileRecorder(harness.scheduler, LogWriter(path, header))
    world = World(harness, recorder=recorder, overlap=overlap)
    for idx in range(6):
        world.submit(f"r{idx}", max_new_tokens=3 + idx, queue_timeout_s=1.5)
        world.steps(2)
    world.arriving.append(AbortRequest("r3", "gone"))
    world.stops_after = world.num_heartbeats + 60
    world.loop.run()

    (result,) = [replay(run) for run in read_runs(path)]

    assert result.is_equal
    assert (result.num_requests, result.num_passes) == (6, harness.scheduler.decisions.num_passes)


def test_while_nobody_asks_it_prepares_and_waits_when_that_is_done(make_scheduler, overlap):
    world = World(make_scheduler(), overlap=overlap, num_preparations=3)

    world.steps(6)

    assert world.prepared_at == [(0, 0)] * 3
    assert world.waits_s[:4] == [0.0] * 4
    assert all(wait_s > 0.0 for wait_s in world.waits_s[4:])


def test_requests_come_before_preparations_and_bring_new_ones(make_scheduler, overlap):
    world = World(make_scheduler(), overlap=overlap, num_preparations=100)
    world.steps(3)
    num_before = len(world.prepared_at)
    world.submit("r1", max_new_tokens=4)
    while not world.rows or world.scheduler.num_unfinished:
        world.steps(1)
    assert len(world.prepared_at) == num_before, "none while there was a request"
    world.num_preparations = 1  # the pages that it took are known from here on

    world.steps(4)

    assert world.prepared_at[num_before:] == [(0, world.scheduler.highest_used_page)]
    assert world.scheduler.highest_used_page > 0


def test_a_crash_of_the_loop_closes_the_log(make_scheduler, monkeypatch):
    closed = []

    class Closing(Recorder):
        def close(self) -> None:
            closed.append(1)

    harness = make_scheduler()
    world = World(harness, recorder=Closing())
    world.submit("r1", max_new_tokens=3)

    def fail(*_args: object) -> None:
        raise AssertionError("a page is missing")

    monkeypatch.setattr(harness.scheduler, "next_batch", fail)
    with pytest.raises(AssertionError):
        world.loop.run()

    assert closed == [1]
