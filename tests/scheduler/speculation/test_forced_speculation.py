"""Forced tokens of grammars are drafts, also with `--speculative off`: the same answers in fewer steps."""

from __future__ import annotations

from typing import Any

import pytest

from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import MAX_DRAFT_STEP_TOKENS
from engine.scheduler.batch import ScheduleBatch
from engine.scheduler.grammar.grammar_rules import GrammarDrafts
from tests.scheduler.fake_runner import expected_output, ints
from tests.scheduler.grammar.toy_matcher import ToyGrammar
from tests.scheduler.harness import VOCAB_SIZE, Harness

FORCED = ToyGrammar(seed=2, forced=((3, 13), (20, 26)))
MUTE = ToyGrammar(seed=2, forced=((3, 13), (20, 26)), knows_forced=False)


def run(*grammars: ToyGrammar | None, submit: dict[str, Any] | None = None, **settings: Any) -> Any:
    """The steps and the harness; its check compares each answer with the one that it gets alone."""
    harness = Harness(**{"num_pages": 300, "max_running_requests": 16, **settings})
    for idx, grammar in enumerate(grammars):
        harness.submit(prompt=[1 + idx, 2, 3], grammar=grammar, **{"max_new_tokens": 30, **(submit or {})})
    return harness.run_until_idle(), harness


def drafts_of(batches: list[ScheduleBatch]) -> list[int]:
    return [batch.num_drafts for batch in batches if batch.num_drafts]


@pytest.mark.parametrize("speculative", ["off", "ngram"])
def test_each_stretch_takes_one_step(speculative):
    steps, harness = run(FORCED, speculative=speculative, memory=None)
    plain_steps, plain = run(MUTE, speculative=speculative, memory=None)
    assert harness.answers["r0"].tokens == plain.answers["r0"].tokens
    assert len(plain_steps) == 30
    assert drafts_of(steps) == [10, 6] and len(steps) == 30 - 16
    report = harness.scheduler.report(0.0)
    assert (report.totals.draft_tokens, report.totals.accepted_draft_tokens) == (16, 16)


@pytest.mark.parametrize("length", [5, 13, 14, 23])
def test_an_answer_may_end_within_a_stretch(length):
    """By its grammar, and by its length; no draft is beyond either."""
    grammar = ToyGrammar(seed=2, length=length, forced=FORCED.forced)
    _, harness = run(grammar)
    assert harness.answers["r0"].finish.matched == "grammar"
    steps, harness = run(FORCED, submit={"max_new_tokens": length})
    assert len(harness.answers["r0"].tokens) == length
    report = harness.scheduler.report(0.0)
    assert report.totals.generation_tokens == length
    assert sum(drafts_of(steps)) == report.totals.accepted_draft_tokens


def test_none_with_overlap():
    steps, _ = run(FORCED, overlap=1)
    assert not drafts_of(steps)


@pytest.mark.parametrize(
    "wish", [{"speculative": False}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.2}], ids=str
)
def test_none_where_drafts_could_change_an_answer(wish):
    steps, _ = run(FORCED, submit=wish)
    assert not drafts_of(steps)


def test_none_beside_prompts():
    harness = Harness(chunked_prefill_size=8, num_pages=300)
    harness.submit("a", prompt=[1, 2, 3], grammar=FORCED, max_new_tokens=30)
    harness.step()
    harness.submit("b", prompt_len=60, max_new_tokens=3)
    steps = harness.run_until_idle()
    assert any(batch.num_extends for batch in steps[1:])
    assert all(not batch.num_drafts for batch in steps if batch.num_extends)


@pytest.mark.slow
def test_a_step_has_at_most_so_many_tokens():
    grammar = ToyGrammar(seed=2, forced=((1, 60),))
    steps, _ = run(*[grammar] * 5, submit={"max_new_tokens": 70})
    sizes = [batch.plan.total_num_scheduled_tokens for batch in steps if batch.num_drafts]
    assert max(sizes) == MAX_DRAFT_STEP_TOKENS


@pytest.mark.parametrize("num_pages", range(12, 22))
def test_drafts_retract_no_request(num_pages):
    retracted = []
    for grammar in (FORCED, MUTE):
        _, harness = run(
            *[grammar] * 2,
            num_pages=num_pages,
            page_size=2,
            radix_cache=False,
            schedule_conservativeness=0.01,
            admission_estimator="none",
            submit={"max_new_tokens": 16},
        )
        retracted.append(harness.scheduler.report(0.0).totals.retracted_reqs)
    assert retracted[0] <= retracted[1]


def test_few_drafts_do_not_displace_inner_steps():
    """One forced run of one token among five requests; without multi-step decodes it is worth a draft."""
    grammars = [ToyGrammar(seed=2, forced=((9, 10),)), None, None, None, None]
    steps, _ = run(*grammars, multi_step_ms=45.0)
    assert not drafts_of(steps) and max(batch.plan.num_rounds for batch in steps) == 4
    steps, _ = run(*grammars, multi_step_ms=0.0)
    assert drafts_of(steps) == [1]


def test_enough_drafts_do():
    steps, _ = run(FORCED, None, None, None, multi_step_ms=45.0)
    assert drafts_of(steps)
    assert any(batch.plan.num_rounds > 1 for batch in steps)
    assert not any(batch.num_drafts and batch.plan.num_rounds > 1 for batch in steps)


def test_the_device_ran_out_of_memory():
    harness = Harness(num_pages=300)
    harness.submit("a", prompt=[1, 2, 3], grammar=FORCED, max_new_tokens=30)
    harness.submit("b", prompt=[1, 2, 4], max_new_tokens=30)
    failed: list[int] = []

    def no_memory(plan: Any) -> bool:
        if plan.num_drafts and not failed:
            failed.append(plan.step_id)
        return plan.step_id in failed

    harness.runner.no_memory = no_memory
    steps = harness.run_until_idle()
    assert failed and all(batch.plan.step_id <= failed[0] for batch in steps if batch.num_drafts)


def test_a_step_without_grammars_asks_nothing(monkeypatch):
    """One look-up of an array, and no work per request."""
    harness = Harness(num_pages=300)
    for _ in range(4):
        harness.submit(max_new_tokens=5)
    drafts = harness.scheduler._parts.grammar_drafts
    monkeypatch.setattr(type(drafts), "propose", None)
    harness.run_until_idle()


# ------------------------------------------------------------ with n-gram drafts


CIRCLE = [11, 12, 13, 14, 15, 16]


def test_ngram_drafts_are_those_that_the_grammar_allows():
    """The check of masks and answers is the harness's; here: there are some, and not all are allowed."""
    num_drafts = []
    for seed in range(6):
        harness = Harness(memory=1, speculative="ngram", num_pages=300)
        grammar = ToyGrammar(seed=seed, knows_forced=False)
        harness.submit("a", prompt=CIRCLE * 3, grammar=grammar, max_new_tokens=150)
        steps = harness.run_until_idle()
        num_drafts.append(sum(batch.num_drafts for batch in steps))
        drafted = {len(ints(batch.plan.draft_ids)) for batch in steps}
        assert drafted <= set(range(9))
    assert sum(num_drafts) > 0


def test_ngram_drafts_follow_forced_ones(monkeypatch):
    """The prompt has the whole answer, so n-grams find the forced tokens and those after them."""
    grammar = ToyGrammar(seed=2, forced=((10, 13), (30, 33)))
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    tokens, _ = expected_output([5], params, frozenset([0]), VOCAB_SIZE, 1, grammar)
    proposals: list[tuple[list[int], int]] = []
    propose = GrammarDrafts.propose

    def noted(*args: Any) -> tuple[list[int], int]:
        proposals.append(propose(*args))
        return proposals[-1]

    monkeypatch.setattr(GrammarDrafts, "propose", noted)
    harness = Harness(memory=1, speculative="ngram", num_pages=300)
    harness.submit("a", prompt=[*tokens, 5], grammar=grammar, max_new_tokens=60)
    steps = harness.run_until_idle()
    assert any(0 < num_forced < len(token_ids) for token_ids, num_forced in proposals)
    report = harness.scheduler.report(0.0)
    assert len(steps) < 20 and report.totals.accepted_draft_tokens == sum(batch.num_drafts for batch in steps)
