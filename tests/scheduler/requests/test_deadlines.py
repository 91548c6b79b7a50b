"""Tests of `scheduler/requests/deadlines.py`: nobody waits longer than was said, and everybody learns why."""

from __future__ import annotations

import pytest

from engine.runtime.messages import FinishKind


def test_a_request_that_is_not_started_in_time_is_answered(make_scheduler):
    harness = make_scheduler(max_running_requests=1, queue_timeout=0.05)
    harness.submit("runs", max_new_tokens=20)
    harness.step()
    harness.submit("waits")

    for _ in range(8):
        harness.step()

    finish = harness.answers["waits"].finish
    assert (finish.kind, finish.status) == (FinishKind.ERROR, 503)
    assert "waited 0.1 s to be started, the limit is 0.05 s" in finish.message
    assert harness.scheduler.report(0.0).totals.timed_out_reqs == 1
    harness.run_until_idle()
    assert harness.answers["runs"].finish.kind is FinishKind.LENGTH  # it was started in time


def test_a_request_that_takes_too_long_is_answered_and_frees_everything(make_scheduler):
    harness = make_scheduler(request_timeout=0.1)
    harness.submit("slow", max_new_tokens=100)

    harness.run_until_idle()

    answer = harness.answers["slow"]
    assert (answer.finish.kind, answer.finish.status) == (FinishKind.ERROR, 504)
    assert 5 <= len(answer.tokens) <= 11
    assert "of at most 100 tokens, the limit is 0.1 s" in answer.finish.message


@pytest.mark.parametrize(("server_s", "own_s"), [(10.0, 0.05), (0.05, 10.0), (None, 0.05)])
def test_the_shorter_of_the_two_limits_counts(make_scheduler, server_s, own_s):
    harness = make_scheduler(max_running_requests=1, queue_timeout=server_s)
    harness.submit("runs", max_new_tokens=20)
    harness.step()
    harness.submit("waits", message={"queue_timeout_s": own_s})

    for _ in range(8):
        harness.step()

    assert harness.answers["waits"].finish.status == 503
    harness.run_until_idle()


def test_a_retracted_request_was_started_and_has_no_queue_timeout(make_scheduler):
    harness = make_scheduler(queue_timeout=0.05, chaos="retract=1:5")
    harness.submit("r", max_new_tokens=8)

    harness.run_until_idle()

    assert harness.answers["r"].finish.kind is FinishKind.LENGTH
    assert harness.answers["r"].rows[-1].usage.num_retractions == 5


def test_the_loop_learns_when_to_wake(make_scheduler):
    harness = make_scheduler(queue_timeout=5.0, request_timeout=60.0)
    assert harness.scheduler.wake_s() is None
    harness.submit("r", max_new_tokens=2)

    assert harness.scheduler.wake_s() == harness.now_s + 5.0
    harness.step()
    assert harness.scheduler.wake_s() == pytest.approx(harness.now_s - 0.01 + 60.0)
    harness.run_until_idle()
    assert harness.scheduler.wake_s() is None


def test_requests_that_have_ended_are_forgotten_also_behind_an_old_one(make_scheduler):
    harness = make_scheduler(request_timeout=1000.0)
    harness.submit("old", prompt_len=4, max_new_tokens=400)
    for idx in range(300):
        harness.submit(f"r{idx}", prompt_len=4, max_new_tokens=1)
        harness.step()

    assert len(harness.scheduler._parts.deadlines._heap) <= 128
    harness.run_until_idle()
