"""Tests of `scheduler/pass_state.py`: what decides is the state of a pass; its record only tells of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.runtime.scheduler_report import SchedulerReport
from engine.runtime.step_plan import ForwardMode, StepPlan
from engine.scheduler import pass_state
from engine.scheduler.batch import ScheduleBatch
from engine.scheduler.pass_state import PASSES_BEFORE_ALARM, PASSES_BEFORE_REPAIR, PassState, record_of
from engine.scheduler.records.decision_log import (
    DecisionLog,
    DecisionRecord,
    PageCounts,
    PassRecord,
    Retraction,
)
from engine.scheduler.records.verdict import AddReqResult, Reason, Verdict

from .harness import Harness
from .test_stall import break_admission, idle_passes
from .test_whole_scheduler import configs, live, one_of

SCHEDULER = Path(pass_state.__file__).parent


class NoLog(DecisionLog):
    """Keeps nothing, and cannot be read."""

    def append(self, record: DecisionRecord) -> None:
        pass

    def since(self, num_records: int) -> list[DecisionRecord]:
        return []  # the harness asks for what there is to check

    def __iter__(self) -> Iterator[DecisionRecord]:
        raise AssertionError("the decision log is read")

    @property
    def passes(self) -> list[PassRecord]:
        raise AssertionError("the decision log is read")

    @property
    def last(self) -> PassRecord:
        raise AssertionError("the decision log is read")


class Watched(Harness):
    """Keeps what came of each pass: the plan, and what the scheduler reports of itself."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.plans: list[StepPlan | None] = []
        self.reports: list[SchedulerReport] = []

    def step(self) -> ScheduleBatch | None:
        batch = super().step()
        self.plans.append(batch.plan if batch is not None else None)
        self.reports.append(self.scheduler.report(self.now_s))
        return batch


class Unlogged(Watched):
    """The same with `NoLog`, so that there are no records to check."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(decisions=NoLog(), **settings)

    def check_verdicts(self, records: list[PassRecord], queued: int | None) -> None:
        assert records == []


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(config=configs(), seed=st.integers(0, 2**32), num_acts=one_of(20, 60))
def test_a_log_that_keeps_nothing_changes_no_decision(config, seed, num_acts):
    logged, unlogged = Watched(**config), Unlogged(**config)
    live(logged, seed, num_acts)
    live(unlogged, seed, num_acts)

    assert logged.plans == unlogged.plans
    assert logged.reports == unlogged.reports
    assert {rid: answer.rows for rid, answer in logged.answers.items()} == {
        rid: answer.rows for rid, answer in unlogged.answers.items()
    }
    assert unlogged.scheduler.decisions.num_records == 0


def test_a_device_without_memory_is_handled_the_same_without_a_log():
    harnesses = [Watched(), Unlogged()]
    for harness in harnesses:
        harness.runner.no_memory = lambda plan: plan.step_id in (1, 3, 4)
        for number in range(4):
            harness.submit(prompt_len=8 + number, max_new_tokens=6)
        harness.run_until_idle()

    logged, unlogged = harnesses
    assert logged.plans == unlogged.plans
    assert logged.reports == unlogged.reports
    assert logged.reports[-1].totals.retracted_reqs > 0


def test_a_stall_is_repaired_and_reported_without_a_log(monkeypatch):
    harness = Unlogged(page_size=4)
    harness.submit(prompt_len=40)
    harness.run_until_idle()
    assert harness.pages().cached > 0
    break_admission(monkeypatch)
    harness.submit("r")

    idle_passes(harness, PASSES_BEFORE_REPAIR)
    assert harness.pages().cached == 0
    idle_passes(harness, PASSES_BEFORE_ALARM - PASSES_BEFORE_REPAIR)

    report = harness.scheduler.report(harness.now_s)
    assert report.stalled.startswith("1 requests wait and none can be admitted: NO_KV r")
    assert report.waiting_by_reason == {"no_kv": 1}


MAY_NAME_RECORDS = (
    "records/",
    "journal/",
    "assembly.py",
    "event_loop.py",
    "queries/calls.py",
    "pass_state.py",
    "scheduler.py",
    "why.py",
    "request_story.py",
)
"""They make records, keep them, or answer questions from them; the rest of the scheduler decides."""


def test_no_part_that_decides_knows_the_records_of_passes():
    wrong = []
    records = {"DecisionLog", "PassRecord"}
    for path in SCHEDULER.rglob("*.py"):
        text = path.read_text()
        if not any(record in text for record in records):  # parsing takes longer than looking
            continue
        name = path.relative_to(SCHEDULER).as_posix()
        imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
        named = {alias.name for node in imports for alias in node.names} & records
        if named and not any(part in name for part in MAY_NAME_RECORDS):
            wrong.append(f"{name} imports {sorted(named)}")
    assert wrong == []


# ---------------------------------------------------------------- the state, and the record made of it


def test_the_rest_is_waits_with_its_grammar_and_without_a_verdict():
    state = PassState(1.0, num_waiting=5, num_grammar=1)
    state.verdicts.append(Verdict("a", AddReqResult.CONTINUE, Reason.ADMITTED))

    state.refuse_rest(Reason.CHUNK_BUDGET, at="a")

    assert (state.num_rest, state.rest_reason, state.rest_behind) == (3, Reason.CHUNK_BUDGET, "a")


def test_there_is_no_reason_for_an_empty_rest():
    state = PassState(1.0, num_waiting=1)
    state.verdicts.append(Verdict("a", AddReqResult.CONTINUE, Reason.ADMITTED))

    state.refuse_rest(Reason.CHUNK_BUDGET)

    assert (state.num_rest, state.rest_reason) == (0, None)


@pytest.mark.parametrize("field", ["num_waiting", "continued", "retractions"])
def test_a_pass_with_something_to_decide_is_not_empty(field):
    state = PassState(1.0)
    assert state.is_empty
    if field == "num_waiting":
        state.num_waiting = 1
    elif field == "continued":
        state.continued.append(Verdict("a", AddReqResult.CONTINUE, Reason.CHUNK_CONTINUED))
    else:
        state.add_retraction(Retraction("a", "recompute", "memory", 1, 2))
        assert state.gave_memory_back and state.num_retractions == 1

    assert not state.is_empty


def test_the_record_says_all_that_the_state_says():
    """Each attribute of a state has its own value here, and the record has each of them under the same name."""
    values: dict[str, Any] = {name: f"value of {name}" for name in PassState.__struct_fields__}
    pages = PageCounts(1, 2, 3, 4)

    record = record_of(
        PassState(**values), None, num_running=5, evicted_pages=6, pages=pages, grammar_drafts={}
    )

    assert {name: getattr(record, name) for name in values} == values
    assert (record.num_running, record.evicted_pages, record.pages) == (5, 6, pages)
    assert (record.step_id, record.mode, record.num_decodes, record.plan_crc) == (0, ForwardMode.IDLE, 0, 0)


def test_the_record_describes_the_batch(make_scheduler):
    harness = make_scheduler()
    harness.submit(max_new_tokens=3)
    harness.step()
    harness.submit()

    batch = harness.step()

    record = harness.last_pass
    assert (record.step_id, record.mode, record.num_decodes) == (2, ForwardMode.MIXED, 1)
    assert record.plan_crc == batch.checksum()
