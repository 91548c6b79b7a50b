"""`--speculative ngram`: the same answers in fewer steps; where it does not pay, as many steps and no drafts.

`test_whole_scheduler.py` has random lives with it, and `test_replay.py` replays some.
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest

from engine.runtime.messages import FinishKind
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import StepPlan
from engine.scheduler.batch import ScheduleBatch
from engine.scheduler.queries.why import explain
from engine.scheduler.records.decision_log import PassRecord
from engine.scheduler.requests.req import Req
from engine.scheduler.speculation.ngram_proposer import NgramProposer
from engine.scheduler.speculation.speculation import NgramSpeculation
from tests.scheduler.fake_runner import expected_output, ints, remembered
from tests.scheduler.harness import VOCAB_SIZE, Harness
from tests.scheduler.speculation.proposers import proposing

CIRCLE = [11, 12, 13, 14, 15, 16]


@pytest.fixture
def make_harness() -> Any:
    def make(**settings: Any) -> Harness:
        return Harness(**{"memory": 1, "speculative": "ngram", "num_pages": 200, **settings})

    return make


def drafts_of(batches: list[ScheduleBatch]) -> list[int]:
    return [batch.num_drafts for batch in batches]


def costing(harness: Harness, token_s: float, step_s: float = 0.01) -> None:
    """Let a step cost this much, and so much more for each token."""

    def seconds(plan: StepPlan) -> float:
        return step_s + token_s * plan.total_num_scheduled_tokens

    harness.runner.step_s = seconds


def test_a_text_that_repeats_itself_takes_few_steps(make_harness):
    harness, plain = make_harness(), make_harness(speculative="off")
    for each in (harness, plain):
        each.submit("a", prompt=CIRCLE, max_new_tokens=120)
    steps, plain_steps = harness.run_until_idle(), plain.run_until_idle()

    assert len(plain_steps) == 120
    assert len(steps) < 45
    assert max(drafts_of(steps)) == 8
    report = harness.scheduler.report(0.0)
    assert report.totals.generation_tokens == 120
    assert report.totals.accepted_draft_tokens > 0.9 * report.totals.draft_tokens > 60
    assert sum(drafts_of(steps)) == report.totals.draft_tokens
    passes = [each for each in harness.scheduler.decisions if isinstance(each, PassRecord)]
    assert [each.num_drafts for each in passes if each.step_id][: len(steps)] == drafts_of(steps)
    assert harness.answers["a"].tokens == plain.answers["a"].tokens
    told = explain(harness.scheduler.decisions, "a").sentence
    checked, accepted = report.totals.draft_tokens, report.totals.accepted_draft_tokens
    per_step = 120 / (120 - accepted)
    assert f"; {per_step:.1f} tokens a step; {accepted / checked:.0%} of {checked} drafts right" in told
    usage = harness.answers["a"].rows[-1].usage
    assert (usage.draft_tokens, usage.accepted_draft_tokens) == (checked, accepted)
    assert {source.split()[0] for source in report.drafts} == {"ngram"}
    assert sum(report.drafts.values()) == checked and sum(report.accepted_drafts.values()) == accepted
    assert report.drafts["ngram 1"] == sum(map(bool, drafts_of(steps))) > report.drafts["ngram 8"] > 0


@pytest.mark.parametrize(
    ("first", "second", "shares"),
    [
        ({}, {}, True),
        ({"message": {"tenant": "a"}}, {"message": {"tenant": "a"}}, True),
        ({"message": {"tenant": "a"}}, {"message": {"tenant": "b"}}, False),
        ({"extra_key": "salt"}, {}, False),
    ],
    ids=str,
)
def test_a_finished_answer_is_a_source_for_its_tenant(make_harness, first, second, shares):
    """The prompt alone has nothing to copy, and its answer is without repetitions."""
    num_steps = []
    for speculative in ("ngram", "suffix"):
        harness = make_harness(speculative=speculative, memory=3, num_pages=400)
        harness.submit("warm", prompt=CIRCLE, max_new_tokens=60, **first)
        harness.run_until_idle()
        harness.submit("a", prompt=CIRCLE, max_new_tokens=60, **second)
        num_steps.append(len(harness.run_until_idle()))
    assert num_steps[0] > 50
    assert num_steps[1] < 20 if shares else num_steps[1] == num_steps[0]


def test_drafts_that_lose_against_multi_step_decodes_are_not_chosen(make_harness):
    """Two right drafts give three tokens for 14 ms, four rounds four for 40 ms, and both the work between steps."""

    def drafted(between_s: float) -> int:
        harness = make_harness(multi_step_ms=45.0, speculative_num_draft_tokens=2)
        settle = harness.scheduler.settle
        costing(harness, token_s=0.002, step_s=0.008)

        def later(batch: ScheduleBatch, result: Any, now_s: float, refused: Any = ()) -> None:
            harness.now_s += result.forward_s + between_s
            settle(batch, result, harness.now_s, refused)

        harness.scheduler.settle = later
        harness.submit("a", prompt=CIRCLE, max_new_tokens=300)
        steps = harness.run_until_idle()
        return sum(map(bool, drafts_of(steps[-30:])))

    assert drafted(0.0) > 20
    assert drafted(0.5) == 0


def test_a_text_that_cannot_be_guessed_has_hardly_any_drafts(make_harness):
    harness = make_harness(memory=None)
    harness.submit(max_new_tokens=200)
    steps = harness.run_until_idle()
    assert len(steps) == 200
    assert sum(drafts_of(steps)) < 20


def test_where_computing_is_the_limit_there_are_none(make_harness):
    harness = make_harness()
    costing(harness, token_s=0.01, step_s=0.0)
    harness.submit(prompt=CIRCLE, max_new_tokens=200)
    steps = harness.run_until_idle()
    assert sum(map(bool, drafts_of(steps))) < 20, "some trials"
    assert not any(drafts_of(steps[50:]))


def test_a_larger_batch_gets_fewer(make_harness):
    """Eight tokens are as dear as one here, the ninth is not."""
    usual = []
    for num_reqs in (1, 4, 8):
        harness = make_harness(num_pages=1000)
        harness.runner.step_s = lambda plan: 0.01 * max(1.0, plan.total_num_scheduled_tokens / 8) ** 2
        for idx in range(num_reqs):
            harness.submit(f"r{idx}", prompt=[*CIRCLE[idx % 6 :], *CIRCLE], max_new_tokens=200)
        steps = harness.run_until_idle()
        late = [batch.num_drafts for batch in steps if len(batch) == num_reqs][15:]
        usual.append(statistics.median(late))
    assert usual[0] == pytest.approx(7, abs=1)
    assert usual[1] == pytest.approx(4, abs=2)
    assert usual[2] == 0


@pytest.mark.parametrize(("num_reqs", "passes_per_look"), [(2, 1), (3, 4), (8, 4)])
def test_many_requests_are_looked_at_in_one_of_four_steps(
    make_harness, monkeypatch, num_reqs, passes_per_look
):
    harness = make_harness(memory=None, num_pages=400)
    looks: list[str] = []
    chances = NgramSpeculation._chances

    def counted(self: NgramSpeculation, req: Req) -> list[float]:
        looks.append(req.rid)
        return chances(self, req)

    monkeypatch.setattr(NgramSpeculation, "_chances", counted)
    for idx in range(num_reqs):
        harness.submit(f"r{idx}", prompt=[idx, 90, 91], max_new_tokens=80)
    steps = harness.run_until_idle()
    plain = [batch for batch in steps if not batch.num_drafts]
    assert len(plain) > 70
    assert looks.count("r0") == pytest.approx(len(plain) / passes_per_look, rel=0.2)


def test_a_copy_of_one_of_many_is_found_soon(make_harness):
    """The others have nothing to copy; with the circle alone the answer takes a third of the steps."""
    num_steps = []
    for num_others in (0, 7):
        harness = make_harness(num_pages=1000)
        for idx in range(num_others):
            harness.submit(
                f"r{idx}", prompt=[30 + idx, 50, 51], max_new_tokens=2 + 20 * idx, speculative=False
            )
        harness.submit("a", prompt=CIRCLE, max_new_tokens=120)
        steps = harness.run_until_idle()
        num_steps.append(sum(any(req.rid == "a" for req in batch.reqs) for batch in steps))
    assert num_steps[0] < 45 and num_steps[1] < num_steps[0] + 30


@pytest.mark.parametrize("max_new_tokens", range(1, 30))
def test_an_answer_ends_at_its_limit(make_harness, max_new_tokens):
    harness = make_harness()
    harness.submit("warm", prompt=CIRCLE, max_new_tokens=40)
    harness.run_until_idle()
    harness.submit("a", prompt=CIRCLE * 3, max_new_tokens=max_new_tokens)
    harness.run_until_idle()  # checks the answers
    assert len(harness.answers["a"].tokens) == max_new_tokens
    assert harness.scheduler.report(0.0).totals.generation_tokens == 40 + max_new_tokens


@pytest.mark.parametrize("max_new_tokens", [30, 31, 35, 38])
def test_a_run_has_the_logprobs_of_its_tokens(make_harness, max_new_tokens):
    """The runner says the position of each token; the row of a run that is cut has as many as tokens."""
    harness = make_harness()
    harness.submit("a", prompt=CIRCLE, max_new_tokens=max_new_tokens, logprobs=0)
    stop = make_harness(eos=(int(np.int32(7)),))
    stop.submit("a", prompt=CIRCLE, max_new_tokens=100, logprobs=0, ignore_eos=False)
    for each in (harness, stop):
        drafted = sum(drafts_of(each.run_until_idle()))
        rows = each.answers["a"].rows
        assert drafted and max(len(row.token_ids) for row in rows) > 4
        values = [np.frombuffer(row.logprobs.token_logprobs, np.float32).tolist() for row in rows]
        assert [len(each) * 4 for each in values] == [len(row.token_ids) for row in rows]
        assert [value for row in values for value in row] == list(range(6, 6 + len(each.answers["a"].tokens)))


@pytest.mark.parametrize("position", range(14, 30))
def test_an_answer_ends_at_its_stop_token_within_a_run(make_harness, position):
    """What follows it in the run is dropped, and its KV is not cached beyond it."""
    harness = make_harness(page_size=1)
    prompt = [7, 3]
    harness.submit("a", prompt=prompt, max_new_tokens=60)
    harness.run_until_idle()
    tokens = harness.answers["a"].tokens
    harness.flush()
    min_new_tokens = position - 1  # so that it is not seen where it comes first
    stop = tokens[position]
    assert stop in tokens[:position], "or it was never guessed"

    harness.submit(
        "b", prompt=prompt, max_new_tokens=60, stop_token_ids=(stop,), min_new_tokens=min_new_tokens
    )
    harness.run_until_idle()

    answer = harness.answers["b"]
    assert answer.finish is not None
    if answer.finish.kind is FinishKind.STOP:
        assert answer.tokens[-1] == stop
    assert harness.pages().cached == len(prompt) + len(answer.tokens) - 1


def test_no_drafts_where_they_could_change_an_answer(make_harness):
    harness = make_harness()
    harness.submit("free", prompt=CIRCLE, max_new_tokens=60)
    harness.submit("frequency", prompt=CIRCLE, max_new_tokens=60, frequency_penalty=0.5)
    harness.submit("presence", prompt=CIRCLE, max_new_tokens=60, presence_penalty=0.5)
    harness.submit("repetition", prompt=CIRCLE, max_new_tokens=60, repetition_penalty=1.5)
    harness.submit("refuses", prompt=CIRCLE, max_new_tokens=60, speculative=False)
    drafted = set()
    for batch in harness.run_until_idle():
        counts = ints(batch.plan.num_drafts)
        drafted |= {req.rid for req, count in zip(batch.reqs, counts, strict=False) if count}
    assert drafted == {"free"}


def test_usage_counts_the_drafts_that_the_answer_has(make_harness):
    """Eight are right, and the fourth of them is a stop token: four became tokens, four did not."""
    prompt = [5, 6, 7]
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    tokens, _ = expected_output(prompt, params, frozenset(), VOCAB_SIZE)
    assert tokens[4] not in tokens[:4]
    with proposing(lambda known: (remembered(list(known), None) >> 7) % VOCAB_SIZE, 1.0):
        harness = make_harness(memory=None)
        harness.submit("a", prompt=prompt, max_new_tokens=20, stop_token_ids=(tokens[4],), logprobs=0)
        harness.run_until_idle()
    last = harness.answers["a"].rows[-1]
    assert len(last.logprobs.token_logprobs) == len(last.token_ids) == 4 * 4, "those of the tokens that stay"
    usage = last.usage
    assert (usage.completion_tokens, usage.draft_tokens, usage.accepted_draft_tokens) == (5, 8, 4)


def test_drafts_cost_nobody_a_page(make_harness):
    """With drafts as many requests lose their places as without: they take what is left over."""
    retracted = []
    for speculative in ("off", "ngram"):
        harness = make_harness(num_pages=14, page_size=2, admission_estimator="full", speculative=speculative)
        for idx in range(6):
            harness.submit(f"r{idx}", prompt=CIRCLE[:4], max_new_tokens=22)
        harness.run_until_idle()
        retracted.append(harness.scheduler.report(0.0).totals.retracted_reqs)
    assert retracted == [0, 0]


@pytest.mark.parametrize("policy", ["fair", "round-robin"])
def test_tokens_that_were_drafted_are_charged_to_their_tenant(make_harness, policy):
    """Two tenants ask for the same; only one is drafted for. They are served in turns all the same."""
    harness = make_harness(
        schedule_policy=policy, tenant_quantum=46, max_running_requests=1, radix_cache=False
    )
    for _ in range(6):
        for tenant in ("drafted", "plain"):
            harness.submit(
                prompt=CIRCLE,
                max_new_tokens=40,
                speculative=tenant == "drafted",
                message={"tenant": tenant},
            )
    tenants, num_drafts = [], 0
    for batch in harness.run_until_idle():
        num_drafts += batch.num_drafts
        if batch.num_extends:
            tenants.append(batch.reqs[0].tenant)
    assert num_drafts > 100
    assert tenants == ["drafted", "plain"] * 6


def test_steps_have_no_more_tokens_than_they_may(make_harness):
    harness = make_harness(max_num_batched_tokens=6, phases="decode-first", max_running_requests=4)
    for idx in range(5):
        harness.submit(f"r{idx}", prompt=CIRCLE, max_new_tokens=60)
    steps = harness.run_until_idle()
    assert max(batch.plan.total_num_scheduled_tokens for batch in steps) == 6
    assert any(drafts_of(steps))


def test_after_device_memory_ran_out_there_are_none_for_a_while(make_harness):
    harness = make_harness()
    harness.submit("a", prompt=CIRCLE, max_new_tokens=100)
    harness.submit("b", prompt=CIRCLE, max_new_tokens=100)
    failed: list[int] = []

    def no_memory(plan: StepPlan) -> bool:
        if plan.draft_ids and not failed:
            failed.append(plan.step_id)
        return plan.step_id in failed

    harness.runner.no_memory = no_memory
    steps = harness.run_until_idle()
    assert failed
    later = [batch for batch in steps if batch.plan.step_id > failed[0]]
    assert not any(drafts_of(later[:90]))


def test_an_abort_and_a_flush_in_between(make_harness):
    harness = make_harness()
    harness.submit("a", prompt=CIRCLE, max_new_tokens=400)
    harness.submit("b", prompt=CIRCLE, max_new_tokens=60)
    while not any(drafts_of([batch for batch in [harness.step()] if batch is not None])):
        pass
    harness.abort("a")
    harness.flush()
    harness.run_until_idle()
    tokens, kind = expected_output(CIRCLE, harness.answers["b"].sampling, harness.eos, VOCAB_SIZE, 1)
    finish = harness.answers["b"].finish
    assert finish is not None
    assert (harness.answers["b"].tokens, finish.kind) == (tokens, kind)


def test_a_plan_says_what_is_drafted(make_harness):
    harness = make_harness()
    harness.submit("a", prompt=CIRCLE, max_new_tokens=60)
    (batch, *_) = [batch for batch in harness.run_until_idle() if batch.num_drafts]
    plan = batch.plan
    assert ints(plan.num_scheduled_tokens) == [1 + batch.num_drafts] == [1 + n for n in ints(plan.num_drafts)]
    assert len(ints(plan.draft_ids)) == batch.num_drafts
    assert np.diff(ints(plan.out_cache_loc)).min() != 0


@pytest.mark.parametrize("where", ["chances", "drafts", "observe"])
def test_a_request_whose_guesses_fail_goes_on_without(make_harness, monkeypatch, caplog, where):
    def fails(*_arguments: Any) -> Any:
        raise ZeroDivisionError("no guess")

    harness, plain = make_harness(), make_harness(speculative="off")
    for each in (harness, plain):
        each.submit("other", prompt=CIRCLE, max_new_tokens=120)
    for _ in range(8):
        harness.step()
    monkeypatch.setattr(NgramProposer, where, fails)
    harness.submit("a", prompt=CIRCLE, max_new_tokens=60)
    harness.run_until_idle()
    plain.run_until_idle()

    assert harness.answers["other"].tokens == plain.answers["other"].tokens
    assert len(harness.answers["a"].tokens) == 60
    failed = [record.args for record in caplog.records if "proposing drafts failed" in record.msg]
    assert sorted(failed) == [("a",), ("other",)]  # once each
