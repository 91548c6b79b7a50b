"""`ListRequests`: each request that is not finished, where it is, and what the last pass decided about it."""

from __future__ import annotations

import pytest

from engine.runtime.messages import Call, ListRequests, RequestList
from engine.scheduler.records.verdict import Reason


def listed(harness, limit=100) -> RequestList:
    harness.scheduler.handle(Call(5, ListRequests(limit)), harness.now_s)
    (done,) = harness.scheduler.take_call_answers()
    assert isinstance(done.answer, RequestList) and done.call_id == 5
    return done.answer


@pytest.fixture
def crowded(make_scheduler):
    """Room for one at a time: one runs, and two wait for its memory."""
    harness = make_scheduler(page_size=4, num_pages=8)
    for rid, length in (("a", 20), ("b", 20), ("c", 24)):
        harness.submit(rid, prompt_len=length, max_new_tokens=8)
    return harness


def test_before_the_first_pass_nobody_has_been_decided_about(crowded):
    told = listed(crowded)
    assert [(each.rid, each.phase, each.reason) for each in told.requests] == [
        (rid, "waiting", "") for rid in "abc"
    ]
    assert (told.total, told.last_pass) == (3, {})


def test_who_runs_comes_first_and_who_waits_has_a_reason_with_its_arithmetic(crowded):
    crowded.step()
    crowded.step()
    crowded.step()
    running, *waiting = listed(crowded).requests

    assert (running.rid, running.phase, running.prompt_len, running.max_new_tokens) == ("a", "decode", 20, 8)
    assert running.output_len >= 1
    assert (running.reason, running.why) == ("", "")
    assert [each.rid for each in waiting] == ["b", "c"]
    assert {each.phase for each in waiting} == {"waiting"}
    assert waiting[0].reason == Reason.NO_KV.value
    assert waiting[0].why == Reason.NO_KV.text
    assert waiting[0].need > waiting[0].have >= 0
    assert all(each.reason for each in waiting)


def test_a_limit_leaves_out_the_last_and_says_how_many_there_are(crowded):
    crowded.step()
    told = listed(crowded, limit=2)
    assert ([each.rid for each in told.requests], told.total) == (["a", "b"], 3)


def test_the_budgets_are_those_of_the_last_pass(crowded):
    crowded.step()
    figures = listed(crowded).last_pass
    assert figures["step_id"] == 1
    assert figures["rem_total_tokens_before"] > figures["rem_total_tokens_after"]


def test_a_question_changes_nothing_and_finished_requests_are_gone(crowded):
    before = crowded.scheduler.decisions.num_records
    listed(crowded)
    assert crowded.scheduler.decisions.num_records == before
    crowded.run_until_idle()
    assert (listed(crowded).requests, listed(crowded).total) == ([], 0)
