"""Drafts that the runner makes: plans with counts only, chosen by learned rates and measured costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.runtime.step_plan import RUNNER_DRAFT, StepPlan
from engine.scheduler.batch import ScheduleBatch
from tests.scheduler.fake_runner import ints
from tests.scheduler.harness import Harness

from ..grammar.toy_matcher import ToyGrammar

RANDOM = list(range(30, 60))
CIRCLE = [11, 12, 13, 14, 15, 16]


def drafted(batches: list[ScheduleBatch]) -> list[int]:
    """Number of drafts of each step."""
    return [batch.num_drafts for batch in batches]


@pytest.fixture
def make_harness() -> Any:
    def make(right: float = 1.0, draft_s: float = 0.0, token_s: float = 0.0, **settings: Any) -> Harness:
        harness = Harness(**{"memory": None, "speculative": "mtp", "num_pages": 200, **settings})
        rng = np.random.default_rng(0)
        harness.runner.drafts_right = lambda: bool(rng.random() < right)
        harness.runner.draft_s = draft_s

        def seconds(plan: StepPlan) -> float:
            return 0.01 + token_s * plan.total_num_scheduled_tokens

        harness.runner.step_s = seconds
        return harness

    return make


def test_the_plan_has_counts_and_the_result_says_what_was_kept(make_harness):
    harness, plain = make_harness(), make_harness(speculative="off")
    for each in (harness, plain):
        each.submit("a", prompt=RANDOM, max_new_tokens=100)
    steps = harness.run_until_idle()
    plain.run_until_idle()
    assert harness.answers["a"].tokens == plain.answers["a"].tokens
    assert len(steps) < 30 and max(drafted(steps)) == 8
    assert all(set(ints(batch.plan.draft_ids)) <= {RUNNER_DRAFT} for batch in steps)
    report = harness.scheduler.report(0.0)
    assert report.totals.draft_tokens == sum(drafted(steps)) > 70
    assert {source.split()[0] for source in report.drafts} == {"mtp"}
    # The last tokens of the answer may cut a run.
    assert report.totals.accepted_draft_tokens == report.totals.draft_tokens


@pytest.mark.parametrize("draft_s", [0.0, 0.0005])
def test_drafts_that_are_wrong_are_given_up_and_tried_again(make_harness, draft_s):
    harness = make_harness(right=0.0, draft_s=draft_s, token_s=0.001, max_model_len=1200, num_pages=400)
    harness.submit(max_new_tokens=1000)
    counts = drafted(harness.run_until_idle())
    assert len(counts) == 1000
    assert sum(map(bool, counts[:100])) > 3
    assert 0 < sum(map(bool, counts[500:])) < 50


def test_a_costly_drafter_makes_fewer(make_harness):
    usual = []
    for draft_s in (0.0001, 0.002, 0.02):
        harness = make_harness(right=0.7, draft_s=draft_s, token_s=0.0005, max_model_len=500)
        harness.submit(max_new_tokens=400)
        usual.append(float(np.mean(drafted(harness.run_until_idle())[-100:])))
    assert usual[0] > usual[1] + 0.5 > usual[2] + 0.5
    assert usual[2] < 0.2


def test_a_copied_text_takes_the_drafts_of_the_scheduler(make_harness):
    """They are right and cost nothing, those of the runner are right in 6 of 10 cases."""
    harness = make_harness(right=0.6, draft_s=0.001, memory=1)
    harness.submit("a", prompt=CIRCLE, max_new_tokens=200)
    steps = harness.run_until_idle()
    assert all(len({draft == RUNNER_DRAFT for draft in ints(batch.plan.draft_ids)}) <= 1 for batch in steps)
    drafts = harness.scheduler.report(0.0).drafts
    methods = {name: sum(n for key, n in drafts.items() if key.startswith(name)) for name in ("ngram", "mtp")}
    assert methods["ngram"] > 100 > methods["mtp"]


def test_a_grammar_has_none_of_them(make_harness):
    harness = make_harness(memory=None)
    harness.submit("a", prompt=RANDOM, grammar=ToyGrammar(seed=2, length=30), max_new_tokens=40)
    harness.submit("b", prompt=RANDOM, max_new_tokens=40)
    steps = harness.run_until_idle()
    for batch in steps:
        counts = ints(batch.plan.num_drafts)
        first = 0
        for req, count in zip(batch.reqs, counts, strict=False):
            if req.rid == "a":
                assert RUNNER_DRAFT not in ints(batch.plan.draft_ids)[first : first + count]
            first += count
    assert any(RUNNER_DRAFT in ints(batch.plan.draft_ids) for batch in steps)


@pytest.mark.parametrize("wish", [{"speculative": False}, {"repetition_penalty": 1.1}])
def test_who_refuses_has_none(make_harness, wish):
    harness = make_harness()
    harness.submit(max_new_tokens=30, **wish)
    assert not any(drafted(harness.run_until_idle()))


def test_with_overlap_a_step_with_drafts_is_settled_before_the_next(make_harness):
    harness, plain = make_harness(overlap=1), make_harness(speculative="off")
    for each in (harness, plain):
        each.submit("a", prompt=RANDOM, max_new_tokens=60)
    assert sum(drafted(harness.run_until_idle())) > 30
    plain.run_until_idle()
    assert harness.answers["a"].tokens == plain.answers["a"].tokens


def test_nothing_is_drafted_beyond_the_positions_that_the_drafter_knows(make_harness):
    harness = make_harness(speculative_len=50)
    harness.submit("a", prompt=RANDOM, max_new_tokens=60)
    steps = [batch for batch in harness.run_until_idle() if batch.num_drafts]
    ends = [batch.plan.num_computed_tokens for batch in steps]
    lasts = [ints(begin)[0] + batch.num_drafts for begin, batch in zip(ends, steps, strict=True)]
    assert max(lasts) == 50


def test_a_wrong_draft_says_nothing_about_those_after_it_and_rates_end_with_their_request(make_harness):
    harness = make_harness(right=0.0)
    rates = harness.scheduler._parts.speculation._runner
    harness.submit("a", prompt=RANDOM, max_new_tokens=40)
    harness.run_until_idle()
    shared = rates._shared
    assert shared[0] < 0.6 and (shared[1:] == 0.6).all()
    assert not rates._own


def test_the_time_of_drafts_is_no_part_of_the_cost_of_a_step(make_harness):
    harness = make_harness(draft_s=0.002)
    harness.submit("a", prompt=RANDOM, max_new_tokens=60)
    assert sum(drafted(harness.run_until_idle())) > 30
    speculation = harness.scheduler._parts.speculation
    assert speculation._costs.seconds(1, 5) == pytest.approx(0.01)
    assert speculation._runner.draft_s == pytest.approx(0.002)
