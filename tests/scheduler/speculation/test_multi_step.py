"""MultiStepDecode: several tokens in a row while nobody waits; the answers are those of step by step.

`test_whole_scheduler.py` and `test_scheduler_properties.py` have random lives with them, `test_replay.py` replays some.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from engine.runtime.messages import FinishKind
from engine.scheduler.batch import ScheduleBatch
from engine.scheduler.journal.recorder import Recorder
from engine.scheduler.pipeline import Pipeline
from engine.scheduler.policy.base import SchedulePolicy
from engine.scheduler.records.decision_log import PassRecord, Settled
from engine.scheduler.speculation.multi_step import MAX_ROUNDS
from tests.scheduler.grammar.toy_matcher import ToyGrammar
from tests.scheduler.harness import Harness

ROUND_MS = 10  # of the FakeRunner


@pytest.fixture
def make_harness() -> Any:
    def make(*, rounds: float = 4.5, **settings: Any) -> Harness:
        return Harness(**{"multi_step_ms": rounds * ROUND_MS, "num_pages": 200, **settings})

    return make


def rounds_of(batches: list[ScheduleBatch]) -> list[int]:
    return [batch.plan.num_rounds for batch in batches]


def made(harness: Harness) -> list[int]:
    """The rounds that were made of each burst."""
    settled = [each for each in harness.scheduler.decisions if isinstance(each, Settled)]
    return [
        np.frombuffer(each.num_next_tokens, dtype=np.int32)[0] for each in settled if each.num_next_tokens
    ]


def test_a_burst_lasts_as_long_as_it_may(make_harness):
    harness = make_harness()
    harness.submit("a", max_new_tokens=14)
    steps = harness.run_until_idle()  # checks the answer
    # the prompt, a step that shows how long a round takes, and what is left of the answer: 12 tokens
    assert rounds_of(steps) == [1, 1, 4, 4, 4]
    assert harness.runner.num_rounds == 12
    assert [len(row.token_ids) // 4 for row in harness.answers["a"].rows] == [1, 1, 4, 4, 4]


@pytest.mark.parametrize(("rounds", "expected"), [(0.0, 1), (1.9, 1), (2.0, 2), (7.0, 7), (1e6, MAX_ROUNDS)])
def test_by_time_and_by_number(make_harness, rounds, expected):
    harness = make_harness(rounds=rounds)
    harness.submit("a", max_new_tokens=100)
    assert max(rounds_of(harness.run_until_idle())) == expected


def test_a_slower_device_makes_fewer(make_harness):
    harness = make_harness()
    harness.submit("a", max_new_tokens=60)
    for _ in range(5):
        harness.step()
    harness.runner.step_s = lambda plan: 0.02
    harness.step()
    assert harness.last_pass.num_rounds == 4 and made(harness)[-1] == 2, "it ends early"
    assert rounds_of(harness.run_until_idle())[:3] == [2, 2, 2]


def test_more_requests_than_were_measured_show_first_how_long_a_round_takes(make_harness):
    """Each costs 10 ms here: bursts of one would last half a second with twelve."""
    harness = make_harness(max_running_requests=12)
    harness.runner.step_s = lambda plan: 0.01 * len(plan.samples)
    harness.submit(max_new_tokens=60)
    for _ in range(6):
        harness.step()
    assert harness.last_pass.num_rounds == 4
    for _ in range(11):
        harness.submit(max_new_tokens=20)
    steps = harness.run_until_idle()
    assert rounds_of([batch for batch in steps if len(batch) > 4 and not batch.num_extends]) == [1] * 19


@pytest.mark.parametrize("max_new_tokens", range(1, 24))
def test_an_answer_ends_at_its_limit_and_nothing_is_computed_behind_it(make_harness, max_new_tokens):
    harness = make_harness()
    harness.submit("a", prompt_len=7, max_new_tokens=max_new_tokens)
    harness.submit("b", prompt_len=7, max_new_tokens=40)
    steps = harness.run_until_idle()
    assert len(harness.answers["a"].tokens) == max_new_tokens
    assert harness.scheduler.report(0.0).totals.generation_tokens == 40 + max_new_tokens
    computed = [batch.plan.num_rounds * len(batch) for batch in steps if not batch.num_extends]
    assert sum(computed) == 38 + max_new_tokens  # all but the two that came of the prompts


def test_it_ends_with_the_token_that_ends_an_answer(make_harness):
    harness = make_harness(rounds=1e6)
    prompt = [3, 1, 4]
    harness.submit("long", prompt=prompt, max_new_tokens=60)
    harness.run_until_idle()
    tokens = harness.answers["long"].tokens
    position = next(n for n in range(20, 60) if tokens[n] not in tokens[:n])

    again = make_harness(rounds=1e6, eos=(tokens[position],))
    again.submit("a", prompt=prompt, max_new_tokens=200, ignore_eos=False)
    again.run_until_idle()
    answer = again.answers["a"]
    assert answer.tokens == tokens[: position + 1]
    assert answer.finish is not None and answer.finish.kind is FinishKind.STOP
    assert again.runner.num_rounds == position - 1, "rounds behind the end"


def test_whoever_ignores_the_end_goes_on_in_the_same_burst(make_harness):
    harness = make_harness(rounds=1e6, eos=tuple(range(97)))
    harness.submit("a", max_new_tokens=1 + 1 + 3 * MAX_ROUNDS)
    steps = harness.run_until_idle()
    assert rounds_of(steps) == [1, 1, MAX_ROUNDS, MAX_ROUNDS, MAX_ROUNDS]


def test_news_end_it_after_the_round(make_harness):
    harness = make_harness(rounds=1e6)
    asked = itertools.count(1)
    harness.has_news = lambda: next(asked) % 3 == 0
    harness.submit("a", max_new_tokens=42)
    steps = harness.run_until_idle()
    assert rounds_of(steps[2:8]) == [MAX_ROUNDS] * 6
    assert made(harness)[:6] == [3] * 6


def test_nobody_waits_for_one(make_harness):
    """With a queue each step is planned anew, and afterwards there are bursts again."""
    harness = make_harness(max_running_requests=1)
    harness.submit("a", max_new_tokens=20)
    harness.submit("b", max_new_tokens=20)
    steps = harness.run_until_idle()
    assert rounds_of(steps) == [1] * 20 + [1, 4, 4, 4, 4, 3]


def test_not_while_a_prompt_is_in_the_middle_of_its_chunks(make_harness):
    harness = make_harness(chunked_prefill_size=8)
    harness.submit("a", max_new_tokens=40)
    for _ in range(3):
        harness.step()
    harness.submit("b", prompt_len=40, max_new_tokens=2)
    steps = harness.run_until_idle()
    last = max(n for n, batch in enumerate(steps) if batch.num_extends)
    assert last > 8
    assert set(rounds_of(steps[:last])) == {1}
    assert max(rounds_of(steps[last:])) == 4


@pytest.mark.parametrize("wish", [{"stop_token_ids": (5,)}, {"logprobs": 0}])
def test_not_for_requests_whose_tokens_are_looked_at_one_by_one(make_harness, wish):
    harness = make_harness()
    harness.submit("a", max_new_tokens=10, min_new_tokens=10, **wish)
    harness.submit("b", max_new_tokens=30)
    steps = harness.run_until_idle()
    together = sum(len(batch) == 2 for batch in steps)
    assert rounds_of(steps)[:together] == [1] * 10
    assert max(rounds_of(steps)) == 4


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("length", [*range(1, 14), 40])
def test_a_grammar_advances_between_rounds_and_ends_the_answer_at_its_token(make_harness, length, late):
    """The runner checks the mask of each round, the harness the tokens. `late`: masks for refused tokens only."""
    harness = make_harness()
    harness.runner.late = late
    harness.submit("a", grammar=ToyGrammar(seed=length, length=length), max_new_tokens=30)
    harness.submit("b", max_new_tokens=30)
    steps = harness.run_until_idle()
    assert len(harness.answers["a"].tokens) == min(length, 30)
    assert max(rounds_of(steps)) == 4
    assert late or harness.runner.num_masks == min(length, 30)
    assert not late or length < 5 or harness.runner.num_masks < min(length, 30)
    assert len(harness.matchers.matchers["a"].tokens) == min(length, 30)
    assert harness.scheduler.report(0.0).totals.generation_tokens == 30 + min(length, 30)


@pytest.mark.parametrize("fault", ["dead", "refuse", "accept"])
@pytest.mark.parametrize("fault_at", [5, 6, 7, 8])
def test_a_grammar_that_fails_in_a_round_ends_its_request_alone(make_harness, fault, fault_at):
    harness = make_harness()
    harness.submit("a", grammar=ToyGrammar(fault=fault, fault_at=fault_at), max_new_tokens=30)
    harness.submit("b", grammar=ToyGrammar(seed=1), max_new_tokens=30)
    harness.run_until_idle()
    kinds = {rid: harness.answers[rid].finish.kind for rid in "ab"}
    assert kinds == {"a": FinishKind.ERROR, "b": FinishKind.LENGTH}


def test_drafts_go_first(make_harness):
    harness = make_harness(speculative="ngram", memory=1)
    harness.submit("a", prompt=[11, 12, 13, 14] * 3, max_new_tokens=200)
    steps = harness.run_until_idle()
    assert any(batch.num_drafts for batch in steps) and max(rounds_of(steps)) > 1
    assert not any(batch.num_drafts and batch.plan.num_rounds > 1 for batch in steps)
    report = harness.scheduler.report(0.0)
    assert sum(batch.num_drafts for batch in steps) == report.totals.draft_tokens
    assert report.totals.accepted_draft_tokens <= report.totals.draft_tokens


@pytest.mark.parametrize("num_pages", range(7, 16))
def test_it_costs_nobody_a_place(make_harness, num_pages):
    """With 12 pages they are just enough for both answers, to the last slot that is written."""
    retracted, most = [], []
    for rounds in (0, 1e6):
        harness = make_harness(
            rounds=rounds,
            num_pages=num_pages,
            page_size=2,
            radix_cache=False,
            schedule_conservativeness=0.01,
            admission_estimator="none",
        )
        for rid in ("a", "b"):
            harness.submit(rid, prompt_len=4, max_new_tokens=9)
        most.append(max(rounds_of(harness.run_until_idle())))
        retracted.append(harness.scheduler.report(0.0).totals.retracted_reqs)
    assert most[0] == 1 < most[1]
    assert retracted[0] == retracted[1] == (num_pages < 12)


def test_after_device_memory_ran_out_there_is_none_for_a_while(make_harness):
    harness = make_harness(num_pages=400)
    harness.submit("a", max_new_tokens=20)
    harness.submit("b", max_new_tokens=480)
    failed: list[int] = []

    def no_memory(plan: Any) -> bool:
        if plan.num_rounds > 1 and not failed:
            failed.append(plan.step_id)
        return plan.step_id in failed

    harness.runner.no_memory = no_memory
    steps = harness.run_until_idle()
    alone = [batch for batch in steps if batch.plan.step_id > failed[0] and batch.reqs[0].rid == "b"]
    assert set(rounds_of(alone[:40])) == {1}, "nobody waits, but the caps are still low"
    assert max(rounds_of(alone)) == 4


def test_one_that_fails_in_it_ends_alone(make_harness):
    harness = make_harness()
    for rid in ("a", "b", "c"):
        harness.submit(rid, max_new_tokens=30)
    for _ in range(3):
        harness.step()
    before = len(harness.answers["b"].tokens)

    def seconds(plan: Any) -> float:
        """The third round of the next burst will fail."""
        rounds.append(plan)
        if len(rounds) == 3 * 2:  # asked by the runner, and by who decides whether it goes on
            harness.runner.fail_next.add("b")
        return 0.01

    rounds: list[Any] = []
    harness.runner.step_s = seconds
    harness.run_until_idle()  # checks the answers
    finish = harness.answers["b"].finish
    assert finish is not None and finish.kind is FinishKind.ERROR
    assert len(harness.answers["b"].tokens) == before + 3, "what it got before that is its own"
    assert [len(harness.answers[rid].tokens) for rid in ("a", "c")] == [30, 30]


def test_memory_is_promised_as_step_by_step(make_harness):
    """The estimate of what answers need falls with each token, not with each step."""
    ratios = []
    for rounds in (0, 4):
        harness = make_harness(rounds=rounds)
        harness.submit("a", max_new_tokens=80)
        while len(harness.answers["a"].tokens) < 42:
            harness.step()
        assert len(harness.answers["a"].tokens) == 42
        ratios.append(harness.scheduler.report(0.0).new_token_ratio)
    assert ratios[0] == pytest.approx(ratios[1])


def test_tenants_pay_for_each_token(make_harness, monkeypatch):
    gained: list[int] = []
    monkeypatch.setattr(SchedulePolicy, "gained", lambda policy, req, num_tokens: gained.append(num_tokens))
    harness = make_harness()
    harness.submit("a", max_new_tokens=23)
    steps = harness.run_until_idle()
    assert len(steps) + sum(gained) == 23, (
        "a step is charged as one token, and `gained` says what comes on top"
    )


def test_a_pipeline_measures_bursts_by_its_own_clock(make_harness):
    """The runner says that a round takes 10 ms; by the clock it takes 20."""
    now_s = [100.0]

    def seconds(_plan: Any) -> float:
        now_s[0] += 0.02
        return 0.01

    harness = make_harness()
    harness.runner.step_s = seconds
    pipeline = Pipeline(harness.scheduler, harness.runner, Recorder(), lambda: now_s[0], overlap=False)
    harness.submit("a", max_new_tokens=20)
    while pipeline.advance(lambda: False):
        pass
    assert max(each.num_rounds for each in harness.scheduler.decisions.passes) == 4
    assert made(harness) == [2] * 9


def test_each_round_is_counted_as_a_step(make_harness):
    counts = []
    for rounds in (0, 4):
        harness = make_harness(rounds=rounds)
        harness.submit("a", max_new_tokens=23)
        harness.run_until_idle()
        report = harness.scheduler.report(0.0)
        counts.append((report.totals.num_steps, round(report.totals.step_s, 6)))
    assert counts[0] == counts[1] == (23, 0.23)


def test_the_decisions_say_so(make_harness):
    harness = make_harness()
    harness.submit("a", max_new_tokens=10)
    steps = harness.run_until_idle()
    passes = [each for each in harness.scheduler.decisions if isinstance(each, PassRecord) and each.step_id]
    assert [each.num_rounds for each in passes][: len(steps)] == rounds_of(steps) == [1, 1, 4, 4]
    assert "decodes=1 rounds=4 waiting=0" in next(passes[2].lines())
    assert "rounds" not in next(passes[1].lines())
