"""Tests of `scheduler/queries/calls.py`: what clients are told, and what they are not."""

from __future__ import annotations

import pytest

from engine.runtime.config.engine_config import CacheConfig, SchedulerConfig
from engine.runtime.messages import Call, Explain, Explanation
from engine.scheduler.queries.why import explain
from engine.scheduler.records.decision_log import Arrived, DecisionLog
from engine.scheduler.records.verdict import MissKind
from engine.scheduler.scheduler import Scheduler


def test_a_client_does_not_learn_what_is_cached_under_another_salt(make_scheduler):
    harness = make_scheduler(page_size=4)
    prompt = list(range(1, 33))
    harness.submit("mine", prompt=prompt, extra_key="a")
    harness.run_until_idle()
    harness.submit("yours", prompt=prompt, extra_key="b")
    harness.run_until_idle()

    told = ask(harness, "yours")

    assert told.found
    operator = explain(harness.scheduler.decisions, "yours")
    assert MissKind.OTHER_NAMESPACE.text in str(operator)
    assert MissKind.OTHER_NAMESPACE.text not in str(told)
    assert MissKind.NO_PREFIX.text in str(told)


def ask(harness, rid):
    harness.scheduler.handle(Call(7, Explain(rid)), harness.now_s)
    (done,) = harness.scheduler.take_call_answers()
    assert done.call_id == 7 and isinstance(done.answer, Explanation)
    return done.answer


@pytest.fixture
def forgetful(make_scheduler):
    """One runs and one waits, for longer than the log remembers; the other has never been there."""
    harness = make_scheduler(max_running_requests=1, max_model_len=2000, num_pages=600)
    decisions = DecisionLog(50)
    harness.scheduler = Scheduler(
        SchedulerConfig(chunked_prefill_size=64), CacheConfig(), harness.capacity, harness.eos, decisions
    )
    harness.submit("runs", max_new_tokens=1500)
    harness.step()
    harness.submit("waits-0")
    for _ in range(100):
        harness.step()
    assert harness.scheduler.decisions is decisions
    assert not any(isinstance(record, Arrived) for record in decisions)
    return harness


def test_who_still_waits_is_known_when_its_arrival_is_forgotten(forgetful):
    told = ask(forgetful, "waits")

    assert told.found
    assert told.sentence == (
        "waits-0 has waited 1.000 s in 25 passes, because the limit of running requests is reached (the decisions "
        "of its first 0.760 s are no longer remembered)."
    )
    assert [row[2] for row in told.rows] == ["came", "forgotten", "waited"]
    assert told.rows[1][3] == "decisions of this time are no longer remembered; it waited all the time"


def test_who_still_runs_is_known_when_its_start_is_forgotten(forgetful):
    told = ask(forgetful, "runs")

    assert told.found
    assert told.sentence.startswith(
        "runs was started 0.010 s after it came, and still runs, 1.000 s after its start"
    )
    assert told.rows[1][3] == "decisions of this time are no longer remembered; it was started at 0.010 s"


def test_who_is_not_there_any_more_is_unknown_and_the_advice_is_the_servers(forgetful):
    told = ask(forgetful, "gone")

    assert not told.found
    assert "the file of --decision-log, where the server has one, keeps all of them" in told.sentence
    assert "--decision-log" not in explain(forgetful.scheduler.decisions, "gone").sentence


def test_who_has_left_is_known_as_long_as_that_is(make_scheduler):
    harness = make_scheduler()
    harness.submit("chatcmpl-1-0", max_new_tokens=2)
    harness.run_until_idle()

    told = ask(harness, "chatcmpl-1")

    assert told.found
    assert told == explain(harness.scheduler.decisions, "chatcmpl-1")


def test_a_grammar_that_is_still_missing_is_known_when_the_arrival_is_forgotten(forgetful):
    forgetful.submit("g", message={"needs_grammar": True})
    for _ in range(100):
        forgetful.step()

    assert "because its grammar is being compiled" in ask(forgetful, "g").sentence


def test_a_pass_answers_one_question_and_all_are_answered(make_scheduler):
    harness = make_scheduler()
    scheduler = harness.scheduler
    for call_id in range(1, 5):
        scheduler.handle(Call(call_id, Explain("r")), harness.now_s)
    answers = [[each.call_id for each in scheduler.take_call_answers()]]

    while scheduler.wake_s() is not None:
        assert scheduler.wake_s() <= harness.now_s  # the loop must not sleep over a question
        scheduler.next_batch(harness.now_s)
        answers.append([each.call_id for each in scheduler.take_call_answers()])

    assert answers == [[1], [2], [3], [4]]
    scheduler.next_batch(harness.now_s)
    scheduler.handle(Call(5, Explain("r")), harness.now_s)
    assert len(scheduler.take_call_answers()) == 1


def test_a_client_does_not_learn_the_ids_of_others(make_scheduler):
    harness = make_scheduler(num_pages=16, page_size=4, max_running_requests=4)
    harness.submit("runs-secret", prompt_len=20, max_new_tokens=30)
    harness.step()
    harness.submit("waits-secret", prompt_len=30, max_new_tokens=20)
    for idx in range(20):
        harness.submit(f"r{idx}", prompt_len=30, max_new_tokens=20)
    harness.step()

    told = []
    for rid in ("r19", "nobody"):
        told.append(ask(harness, rid))
        harness.scheduler.next_batch(harness.now_s)

    assert [each.found for each in told] == [True, False]
    assert "secret" in str(explain(harness.scheduler.decisions, "r19"))
    assert "secret" not in str(told)
    assert "another request" in str(told)


def test_who_was_submitted_again_is_known_by_its_first_name(make_scheduler):
    harness = make_scheduler()
    harness.submit("cmpl-1-0", prompt=[1, 2, 3], max_new_tokens=8)
    harness.step()
    harness.abort("cmpl-1-0", "submitted again")
    tokens = harness.answers["cmpl-1-0"].tokens
    harness.submit("cmpl-1-0+1", prompt=[1, 2, 3], max_new_tokens=8, delivered=tokens)
    harness.run_until_idle()

    for name in ("cmpl-1", "cmpl-1-0"):
        harness.step()  # one question is answered per pass
        told = ask(harness, name)
        assert told.found
        assert told.sentence.startswith("cmpl-1-0+1 ")
        assert f"{len(tokens)} of them delivered before a process was lost" in str(told.rows)
