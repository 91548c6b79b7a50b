"""Tests of `scheduler/pass_state.py`: requests that wait while nothing happens are noticed, repaired or reported."""

from __future__ import annotations

import logging

from engine.scheduler.pass_state import PASSES_BEFORE_ALARM, PASSES_BEFORE_REPAIR
from engine.scheduler.records.verdict import AddReqResult, Reason, Verdict


def break_admission(monkeypatch):
    """The bug that by design cannot be: the PrefillAdder refuses what fits."""
    monkeypatch.setattr(
        "engine.scheduler.admission.prefill_adder.PrefillAdder.add",
        lambda adder, req, *_: Verdict(req.rid, AddReqResult.NO_TOKEN, Reason.NO_KV, need=9, have=5),
    )


def idle_passes(harness, count):
    for _ in range(count):
        assert harness.step() is None
        harness.scheduler.on_idle()


def test_a_stall_is_reported_with_its_arithmetic_and_health_turns_red(make_scheduler, monkeypatch, caplog):
    harness = make_scheduler()
    break_admission(monkeypatch)
    harness.submit("r")

    with caplog.at_level(logging.ERROR):
        idle_passes(harness, PASSES_BEFORE_ALARM)

    stalled = harness.scheduler.report(0.0).stalled
    assert stalled.startswith(
        "1 requests wait and none can be admitted: NO_KV r: KV memory is short; need 9 have 5"
    )
    assert "NO_KV r" in caplog.text
    monkeypatch.undo()
    harness.run_until_idle()
    assert harness.scheduler.report(0.0).stalled == ""


def test_everything_remembered_is_thrown_away_first(make_scheduler, monkeypatch):
    harness = make_scheduler(page_size=4)
    harness.submit(prompt_len=40)
    harness.run_until_idle()
    assert harness.pages().cached > 0
    break_admission(monkeypatch)
    harness.submit("r")

    idle_passes(harness, PASSES_BEFORE_REPAIR)

    assert harness.pages().cached == 0
    assert harness.scheduler.report(0.0).stalled == ""
    monkeypatch.undo()
    harness.run_until_idle()
