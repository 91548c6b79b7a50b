"""What a loop tells its recorder is in the file, in order, at the cost of one write per pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.runtime.config.engine_config import EngineConfig
from engine.runtime.messages import Call, Explain, FlushCache, GenerateRequest, ListRequests
from engine.scheduler.journal.log_file import Idle, Input, LogRecord, Planning, read_runs
from engine.scheduler.journal.recorder import Recorder, make_recorder
from engine.scheduler.records.decision_log import Arrived, PassRecord, Settled
from tests.scheduler.harness import Harness
from tests.scheduler.journal.log_samples import count_writes
from tests.scheduler.journal.recorded import finish, record, scheduler_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "decisions.log"


def read(path: Path) -> list[LogRecord]:
    (records,) = [list(run.records) for run in read_runs(path)]
    return records


def test_the_records_stand_in_the_order_of_the_calls(path):
    harness = record(path)
    harness.submit("r1", max_new_tokens=2)
    harness.run_until_idle()
    finish(harness)

    kinds = [type(each).__name__ for each in read(path)]

    step = ["Planning", "PassRecord", "Settled"]
    forgotten = ["Planning", "Settled"]  # the step without tokens that tells the runner who has left
    assert kinds == ["Input", "Arrived", *step, *step, *forgotten, "Planning", "Idle"]


def test_with_overlap_a_step_is_planned_before_the_one_before_it_is_settled(path):
    harness = record(path, overlap=1)
    harness.submit("r1", max_new_tokens=3)
    harness.run_until_idle()
    finish(harness)

    steps = [(type(each), each.step_id) for each in read(path) if isinstance(each, PassRecord | Settled)]

    assert steps[:4] == [(PassRecord, 1), (PassRecord, 2), (Settled, 1), (PassRecord, 3)]


def test_the_file_has_what_the_scheduler_remembers(path):
    harness = record(path, max_running_requests=2)
    for _ in range(5):
        harness.submit(max_new_tokens=5)
    harness.run_until_idle()
    finish(harness)

    (decisions,) = [list(run.decisions) for run in read_runs(path)]

    assert decisions == list(harness.scheduler.decisions)


def test_a_pass_is_one_write(path, monkeypatch):
    harness = record(path)
    harness.submit(max_new_tokens=10)
    harness.step()
    writes = count_writes(monkeypatch)

    for _ in range(5):
        harness.step()

    assert len(writes) == 5
    finish(harness)


def test_a_crash_of_the_runner_leaves_the_pass_it_crashed_in(path):
    harness = record(path)
    harness.submit("r1")
    harness.scheduler.next_batch(101.0)  # and nothing more: the process is gone

    assert [type(each) for each in read(path)] == [Input, Arrived, Planning, PassRecord]


def test_a_message_that_the_scheduler_dies_of_is_in_the_file(path, monkeypatch):
    harness = record(path)

    def die(*_args: object) -> None:
        raise AssertionError("a page is missing")

    monkeypatch.setattr(scheduler_of(harness), "handle", die)
    with pytest.raises(AssertionError):
        harness.submit("r1")
    finish(harness)

    (last,) = read(path)
    assert isinstance(last, Input)
    assert isinstance(last.message, GenerateRequest)


def test_a_pass_that_the_scheduler_dies_of_is_in_the_file(path, monkeypatch):
    harness = record(path)
    harness.submit("r1")

    def die(*_args: object) -> None:
        raise AssertionError("a page is missing")

    monkeypatch.setattr(scheduler_of(harness), "next_batch", die)
    with pytest.raises(AssertionError):
        harness.step()
    finish(harness)

    assert isinstance(read(path)[-1], Planning)


def test_an_idle_server_writes_nothing(path):
    harness = record(path)
    harness.scheduler.on_idle()
    size = path.stat().st_size

    for idx in range(1000):
        harness.scheduler.next_batch(200.0 + idx)

    assert path.stat().st_size == size
    finish(harness)


def test_of_quiet_passes_the_last_is_written_when_something_happens(path):
    harness = record(path)
    for now_s in (200.0, 201.0, 202.0):
        harness.scheduler.next_batch(now_s)
    harness.scheduler.handle(Call(1, FlushCache()), 203.0)
    finish(harness)

    assert read(path) == [Planning(202.0), Input(203.0, Call(1, FlushCache()))]


def test_questions_are_not_recorded(path):
    harness = record(path)
    harness.scheduler.handle(Call(1, Explain("r1")), 100.0)
    harness.scheduler.handle(Call(2, ListRequests(10)), 100.0)
    harness.scheduler.on_idle()
    finish(harness)

    assert [type(each) for each in read(path)] == [Idle]


def test_a_refused_request_came_but_never_arrived(path):
    harness = record(path, max_model_len=64)
    harness.submit("huge", prompt_len=100)
    finish(harness)

    assert [type(each) for each in read(path)] == [Input]


def test_off_there_is_no_recorder():
    harness = Harness()

    recorder = make_recorder(
        EngineConfig(), harness.capacity, harness.eos, harness.scheduler, wall_s=0.0, now_s=0.0
    )

    assert type(recorder) is Recorder
