"""Drafts that the runner makes: plans with counts only, chosen by learned rates and measured costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.runtime.step_plan import RUNNER_DRAFT, ForwardMode, StepPlan, StepResult
from engine.scheduler.batch import ScheduleBatch
from engine.scheduler.queries.why import explain
from engine.scheduler.requests.prompt_images import PromptImages
from engine.scheduler.requests.req import Req
from engine.scheduler.speculation.runner_drafts import DraftRates, RunnerDrafts
from engine.scheduler.speculation.speculation import NgramSpeculation
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


STEP_S = 0.01
Right = Callable[[int], float]
"""The share of right drafts by the number of tokens of the answer so far."""


class Times(NamedTuple):
    """Times of one answer after its first token.

    Attributes:
        seconds: of all steps.
        plain_s: of as many plain steps as it has tokens.
        longest_s: of the longest step.
        steps: for each step the number of tokens before it, and of the runner's drafts.
    """

    seconds: float
    plain_s: float
    longest_s: float
    steps: list[tuple[int, int]]

    @property
    def is_bounded(self) -> bool:
        """The promise: half a percent, four steps once, and the step of a size that was not measured before."""
        return self.seconds <= 1.005 * self.plain_s + 4 * STEP_S + self.longest_s


def timed(
    right: Right, token_steps: float, draft_steps: float, num_tokens: int, num_reqs: int = 1, seed: int = 0
) -> Times:
    """Answers with a drafter; `token_steps`, `draft_steps`: what one more token and a draft cost, in plain steps."""
    rng = np.random.default_rng(seed)
    harness = Harness(
        memory=None, speculative="mtp", num_pages=num_tokens * num_reqs, max_model_len=2 * num_tokens
    )
    times: list[float] = []
    steps: list[tuple[int, int]] = []

    def seconds(plan: StepPlan) -> float:
        more = plan.total_num_scheduled_tokens - num_reqs if plan.mode is ForwardMode.DECODE else 0
        return STEP_S * (1 + token_steps * more)

    def settle(batch: ScheduleBatch, result: StepResult, now_s: float, refused: Any = ()) -> None:
        if batch.plan.mode is ForwardMode.DECODE:
            times.append(result.forward_s)
            made = ints(batch.plan.draft_ids).count(RUNNER_DRAFT)
            steps.append((len(harness.answers["r0"].tokens), made))
        inner(batch, result, now_s, refused)

    inner = harness.scheduler.settle
    harness.scheduler.settle = settle  # type: ignore[method-assign]
    harness.runner.step_s, harness.runner.draft_s = seconds, draft_steps * STEP_S
    harness.runner.drafts_right = lambda: bool(rng.random() < right(len(harness.answers["r0"].tokens)))
    for idx in range(num_reqs):
        harness.submit(f"r{idx}", prompt=[*RANDOM, idx], max_new_tokens=num_tokens)
    harness.run_until_idle()
    return Times(sum(times), (num_tokens - 1) * STEP_S, max(times), steps)


COSTS = {"AVX2": (0.33, 0.08), "AVX-512": (0.11, 0.06)}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("costs", COSTS)
def test_a_drafter_that_is_never_right_costs_half_a_percent(costs):
    times = timed(lambda _: 0.0, *COSTS[costs], 500)
    assert times.is_bounded
    late = [num_drafts for position, num_drafts in times.steps if position > 300]
    assert sum(late) > 0 and max(late) == 1
    cost = sum(COSTS[costs])
    assert sum(late) * cost <= 0.005 * len(late) + cost, "the credit of the time since then, and one more"


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("costs", "right", "least"),
    [
        ("AVX2", 0.3, 0.96),
        ("AVX2", 0.8, 1.2),
        ("AVX2", 1.0, 1.8),
        ("AVX-512", 0.1, 0.96),
        ("AVX-512", 0.5, 1.2),
        ("AVX-512", 1.0, 3.0),
    ],
)
def test_a_drafter_gains_by_its_share_of_right_drafts(costs, right, least):
    times = timed(lambda _: right, *COSTS[costs], 400)
    assert times.is_bounded
    assert times.plain_s / times.seconds > least


@pytest.mark.parametrize("costs", ["AVX2", pytest.param("AVX-512", marks=pytest.mark.slow)])
def test_a_drafter_that_changes_is_found_and_given_up(costs):
    """From token 200 to 500 it is always right: bad, good, bad."""
    times = timed(lambda position: float(200 <= position < 500), *COSTS[costs], 700)
    assert times.is_bounded
    first = next(position for position, num_drafts in times.steps if position >= 200 and num_drafts > 1)
    assert first < 330, "a trial in at most 82 steps, and some more until the rate has risen"
    late = [num_drafts for position, num_drafts in times.steps if position >= 560]
    assert late and max(late) <= 1


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    shares=st.lists(st.sampled_from([0.0, 0.2, 0.4, 0.6, 0.8, 1.0]), min_size=1, max_size=6),
    token_steps=st.sampled_from([0.0, 0.05, 0.33, 1.0]),
    draft_steps=st.sampled_from([0.0, 0.05, 0.5, 3.0]),
    num_reqs=st.integers(1, 4),
    seed=st.integers(0, 9),
)
def test_no_drafter_is_slower(shares, token_steps, draft_steps, num_reqs, seed):
    """The shares change every 50 tokens."""
    times = timed(
        lambda position: shares[position // 50 % len(shares)],
        token_steps,
        draft_steps,
        300,
        num_reqs,
        seed,
    )
    assert times.is_bounded


@pytest.mark.parametrize("slow", [0, 10], ids=["first", "later"])
def test_a_single_slow_draft_does_not_stop_the_others(make_harness, slow):
    """The first ones are recorded, and any may meet a pause of the machine: 200 plain steps here."""
    harness = make_harness(draft_s=0.0005, token_s=0.0005, max_model_len=700)
    usual, num_drafted = harness.runner.step_s, 0

    def seconds(plan: StepPlan) -> float:
        nonlocal num_drafted
        num_drafted += bool(plan.draft_ids)
        harness.runner.draft_s = 2.0 if num_drafted == slow else 0.0005
        step_s: float = usual(plan)
        return step_s

    harness.runner.step_s = seconds
    harness.runner.draft_s = 2.0 if not slow else 0.0005
    harness.submit(max_new_tokens=600)
    assert np.mean(drafted(harness.run_until_idle())[-20:]) > 4


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


@pytest.mark.parametrize("method", ["mtp", "eagle3", "draft"])
def test_usage_metrics_and_why_tell_about_them(make_harness, method):
    model = {} if method == "mtp" else {"speculative_model": "a drafter"}
    harness = make_harness(0.7, speculative=method, **model)
    harness.submit("a", prompt=RANDOM, max_new_tokens=100)
    steps = harness.run_until_idle()
    report = harness.scheduler.report(0.0)
    usage = harness.answers["a"].rows[-1].usage
    checked, accepted = sum(drafted(steps)), usage.accepted_draft_tokens
    assert 0 < accepted < usage.draft_tokens == checked
    for counts, total in (
        (report.drafts, checked),
        (report.accepted_drafts, report.totals.accepted_draft_tokens),
    ):
        assert {source.split()[0] for source in counts} == {method}
        by_position = [counts[source] for source in sorted(counts, key=lambda source: int(source.split()[1]))]
        assert by_position == sorted(by_position, reverse=True) and sum(by_position) == total
    told = explain(harness.scheduler.decisions, "a").sentence
    per_step = 100 / (100 - accepted)
    assert (
        f"; {per_step:.1f} tokens a step; {accepted / checked:.0%} of {checked} drafts right ({method})"
        in told
    )


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_a_grammar_has_them_too(make_harness, right, overlap, late):
    """They are made without the grammar, which refuses some; where it forces tokens, these are the drafts."""
    grammar = ToyGrammar(seed=2, length=30, forced=((10, 14),))
    harness, plain = make_harness(right, overlap=overlap), make_harness(speculative="off")
    harness.runner.late = late
    for each in (harness, plain):
        each.submit("a", prompt=RANDOM, grammar=grammar, max_new_tokens=40)
        each.submit("b", prompt=RANDOM, max_new_tokens=40)
    steps = harness.run_until_idle()
    plain.run_until_idle()
    for rid in ("a", "b"):
        assert harness.answers[rid].tokens == plain.answers[rid].tokens
        assert harness.answers[rid].finish == plain.answers[rid].finish
    kinds: dict[str, set[bool]] = {"a": set(), "b": set()}
    for batch in steps:
        counts, drafts = ints(batch.plan.num_drafts), ints(batch.plan.draft_ids)
        for req, count in zip(batch.reqs, counts, strict=False):
            kinds[req.rid] |= {draft == RUNNER_DRAFT for draft in drafts[:count]}
            del drafts[:count]
    assert kinds == {"a": {True, False}, "b": {True}}


@pytest.mark.parametrize("wish", [{"speculative": False}, {"repetition_penalty": 1.1}])
def test_who_refuses_has_none(make_harness, wish):
    harness = make_harness()
    harness.submit(max_new_tokens=30, **wish)
    assert not any(drafted(harness.run_until_idle()))


@pytest.mark.parametrize("rope", [b"", b"positions on three axes"])
def test_images_with_positions_on_three_axes_have_none(make_harness, monkeypatch, rope):
    """The drafter turns its heads by plain positions."""
    images = PromptImages(b"", b"", (), (), rope=rope)
    monkeypatch.setattr(RunnerDrafts, "chances", lambda self, req, count: [0.9] * count)
    planned = NgramSpeculation._chances_or_none

    def with_images(self: NgramSpeculation, req: Req, most: int) -> list[float]:
        req.images = images
        found = planned(self, req, most)
        req.images = None
        return found

    monkeypatch.setattr(NgramSpeculation, "_chances_or_none", with_images)
    harness = make_harness()
    harness.submit(prompt=RANDOM, max_new_tokens=30)
    assert any(drafted(harness.run_until_idle())) == (not rope)


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
    assert 48 <= max(lasts) <= 50


def test_the_credit_pays_for_the_drafts_of_the_runner_alone():
    """Three of the scheduler's cost no time to make; two of the runner's cost 2 s, and each to verify 0.1 s."""
    theirs, others = cast(Req, object()), cast(Req, object())
    for credit_s, counts in ((2.25, [2, 3]), (2.15, [0, 3])):
        drafts = RunnerDrafts(0, 8)
        drafts.credit_s, drafts.draft_s = credit_s, 1.0
        drafts.by_runner.add(theirs)
        assert drafts.limit([theirs, others], [2, 3], np.linspace(1.0, 1.8, 9, dtype=np.float64)) == counts


def test_a_plain_step_follows_a_trial():
    drafts, req = RunnerDrafts(0, 8), cast(Req, object())
    found = []
    for _ in range(4):
        drafts.begin_step()
        drafts.chances(req, 1)
        found += drafts.limit([req], [], np.ones(9))
    assert found == [1, 0, 1, 0]


def test_a_wrong_draft_says_nothing_about_those_after_it():
    rates = DraftRates(3, 16)
    for _ in range(50):
        rates.learn(3, 1)
    assert rates.rate(0, 0.5) > 0.85 and rates.rate(1, 0.5) < 0.15
    assert rates.rate(2, 0.5) == 0.5
    for _ in range(2000):
        rates.learn(1, 1)
    assert rates.rate(1, 0.9) == pytest.approx(0.9, abs=0.01), "it fades where nothing is tried"


def test_the_rates_of_a_request_end_with_it(make_harness):
    harness = make_harness(right=0.0)
    harness.submit("a", prompt=RANDOM, max_new_tokens=40)
    harness.run_until_idle()
    assert not harness.scheduler._parts.speculation._runner._own


def test_the_time_of_drafts_is_no_part_of_the_cost_of_a_step(make_harness):
    harness = make_harness(draft_s=0.002)
    harness.submit("a", prompt=RANDOM, max_new_tokens=60)
    assert sum(drafted(harness.run_until_idle())) > 30
    speculation = harness.scheduler._parts.speculation
    assert speculation._costs.seconds(1, 5) == pytest.approx(0.01)
    assert speculation._runner.draft_s == pytest.approx(0.002)
