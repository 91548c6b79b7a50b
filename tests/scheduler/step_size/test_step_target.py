"""Steps in which requests decode: prompts get what the target leaves of their time."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.runtime.pooling import PoolingKind, PoolingParams
from engine.runtime.step_plan import ForwardMode, StepPlan
from engine.scheduler.batch import ScheduleBatch
from engine.scheduler.queries.why import explain
from engine.scheduler.records.decision_log import PassRecord, StepTime
from engine.scheduler.records.verdict import AddReqResult, Reason
from engine.scheduler.step_size.step_target import MAX_PASSES, PromptTime
from tests.scheduler.admission.prefill_pass import Candidate, make_adder, make_budget, make_req, run_pass
from tests.scheduler.fake_runner import ints
from tests.scheduler.harness import Harness

PAGE = 4


class Costs(NamedTuple):
    """A device whose steps take exactly so long; seconds."""

    step_s: float = 0.009
    decode_s: float = 0.0004
    token_s: float = 0.0004
    pair_s: float = 0.0

    def of(self, plan: StepPlan) -> float:
        """A step's time; a request that computes one token decodes, or costs as much."""
        seconds = self.step_s
        starts, lengths = ints(plan.num_computed_tokens), ints(plan.num_scheduled_tokens)
        for start, length in zip(starts, lengths, strict=True):
            pairs = length * start + length * (length + 1) / 2
            seconds += self.decode_s if length == 1 else self.token_s * length + self.pair_s * pairs
        return seconds


def make_harness(costs: Costs, **config: object) -> Harness:
    arguments: dict[str, object] = {"page_size": PAGE, "num_pages": 2000, "max_model_len": 2000}
    arguments |= {"chunked_prefill_size": 512, "target_step_ms": 50.0, "radix_cache": False}
    harness = Harness(**(arguments | config))  # type: ignore[arg-type]
    harness.runner.step_s = costs.of
    return harness


def warm_up(harness: Harness) -> None:
    """Some prompts, and some answers with different numbers of requests: what a server has seen after a second."""
    for prompt_len in (300, 40, 120, 7):
        harness.submit(prompt_len=prompt_len, max_new_tokens=12)
        harness.step()
    harness.run_until_idle()


def passes(harness: Harness, mode: ForwardMode) -> list[PassRecord]:
    return [record for record in harness.scheduler.decisions.passes if record.mode is mode]


# ---------------------------------------------------------------- one pass


def in_time(given_s: float, token_s: float = 0.001) -> dict[str, object]:
    return {"time": PromptTime(given_s, token_s=token_s, pair_s=0.0, page_size=PAGE), "num_decodes": 1}


def test_a_prompt_is_cut_at_the_page_that_the_time_reaches():
    adder = make_adder(make_budget(**in_time(0.0105)))
    [verdict, behind] = [*run_pass(adder, [], [Candidate(make_req("long", 40))]), adder.exhausted()]
    assert (verdict.reason, verdict.extend_len) == (Reason.CHUNKED_IN_TIME, 8)
    assert behind is None, "2.5 tokens are left: somebody whose prefix is cached may need no more"


def test_a_prompt_in_progress_is_cut_and_those_behind_it_wait_for_time():
    adder = make_adder(make_budget(**in_time(0.010)), num_prompts=2)
    req = make_req("long", 40)
    verdicts = run_pass(adder, [(req, 16)], [Candidate(make_req("next", 40))])
    assert [(each.reason, each.extend_len) for each in verdicts] == [
        (Reason.CONTINUED_IN_TIME, 8),
        (Reason.PARTIAL_LIMIT, 40),
    ]

    adder = make_adder(make_budget(**in_time(0.008)))
    run_pass(adder, [(req, 16)], [])
    assert adder.exhausted() is Reason.STEP_TIME


def test_several_short_prompts_share_the_time():
    adder = make_adder(make_budget(**in_time(0.012)), num_prompts=4)
    verdicts = run_pass(adder, [], [Candidate(make_req(name, 5)) for name in "abcd"])
    assert [(each.rid, each.reason, each.extend_len) for each in verdicts] == [
        ("a", Reason.ADMITTED, 5),
        ("b", Reason.ADMITTED, 5),
        ("c", Reason.STEP_TIME, 5),
    ]
    assert verdicts[-1].result is AddReqResult.OTHER and verdicts[-1].have == 2


def test_the_chunk_size_says_so_when_it_is_the_smaller_one():
    adder = make_adder(make_budget(**in_time(1.0)))
    [verdict] = run_pass(adder, [], [Candidate(make_req("long", 40))])
    assert (verdict.reason, verdict.extend_len) == (Reason.CHUNKED, 28)


def test_a_prompt_that_is_never_cut_has_its_step_however_long_it_is():
    adder = make_adder(make_budget(chunk_size=None, **in_time(0.010)), num_prompts=2)
    verdicts = run_pass(adder, [], [Candidate(make_req(name, 40)) for name in "ab"])
    assert [each.reason for each in verdicts] == [Reason.ADMITTED]
    assert adder.exhausted() is Reason.STEP_TIME


# ---------------------------------------------------------------- many steps


def test_mixed_steps_keep_to_the_target_and_others_are_as_large_as_configured():
    harness = make_harness(costs := Costs(pair_s=1e-7))
    warm_up(harness)
    harness.submit("streams", prompt_len=5, max_new_tokens=60)
    harness.step()
    harness.submit("long", prompt_len=1500, max_new_tokens=2)

    mixed = [batch for batch in harness.run_until_idle() if batch.plan.mode is ForwardMode.MIXED]

    seconds = [costs.of(batch.plan) for batch in mixed]
    assert min(seconds[:-1]) > 0.035 and max(seconds) < 0.0525
    harness.submit("alone", prompt_len=1500, max_new_tokens=2)
    lengths = [ints(batch.plan.num_scheduled_tokens) for batch in harness.run_until_idle()]
    assert lengths == [[512], [512], [476], [1]]


def test_the_log_and_why_name_the_limit():
    harness = make_harness(Costs())
    warm_up(harness)
    harness.submit("streams", prompt_len=5, max_new_tokens=60)
    harness.step()
    harness.submit("long", prompt_len=600, max_new_tokens=2)
    harness.step()

    record = harness.last_pass
    (verdict,) = record.verdicts
    assert verdict.reason is Reason.CHUNKED_IN_TIME and 80 <= verdict.extend_len <= 104
    assert isinstance(record.step_time, StepTime)
    assert record.step_time.target_s == 0.05
    assert record.step_time.decodes_s == pytest.approx(0.0094, rel=0.2)
    assert 0 <= record.step_time.left_s < PAGE * record.step_time.token_s
    assert any("STEP_TIME target 50.0 ms: decodes" in line for line in record.lines())
    harness.run_until_idle()
    told = explain(harness.scheduler.decisions, "long").sentence
    assert Reason.CHUNKED_IN_TIME.text in told and Reason.CONTINUED_IN_TIME.text in told


def test_decodes_that_take_longer_than_the_target_do_not_starve_prompts():
    """A large model on few cores: half of each step is for prompts, although no step can reach the target."""
    harness = make_harness(costs := Costs(step_s=0.4, decode_s=0.0, token_s=0.01))
    warm_up(harness)
    harness.submit("streams", prompt_len=5, max_new_tokens=100)
    harness.step()
    harness.submit("prompt", prompt_len=200, max_new_tokens=2)

    mixed = [batch for batch in harness.run_until_idle() if batch.plan.mode is ForwardMode.MIXED]

    assert 4 <= len(mixed) <= 8
    assert max(costs.of(batch.plan) for batch in mixed) < 0.85


def streaming(**settings: Any) -> Harness:
    """Costs are known, and one request decodes."""
    harness = make_harness(Costs(), **settings)
    warm_up(harness)
    harness.submit("streams", prompt_len=5, max_new_tokens=200)
    harness.step()
    return harness


@pytest.mark.parametrize("others", [[], [8], [8, 8]])
def test_a_long_prompt_is_no_queue_for_a_few_short_ones(others):
    harness = streaming()
    for prompt_len in [*others, 1500]:
        harness.submit(prompt_len=prompt_len, max_new_tokens=2)
    harness.step()

    time = harness.last_pass.step_time
    assert time is not None
    assert time.waiting_s > 4 * time.target_s
    assert time.prompts_s == pytest.approx(time.target_s - time.decodes_s)


def test_what_waits_behind_a_prompt_in_progress_is_a_queue():
    harness = streaming()
    harness.submit("long", prompt_len=1500, max_new_tokens=2)
    harness.step()
    for _ in range(2):
        harness.submit(prompt_len=400, max_new_tokens=2)
    harness.step()

    time = harness.last_pass.step_time
    assert time is not None and time.prompts_s == pytest.approx(800 * time.token_s)


def test_prompts_without_a_row_are_no_queue():
    harness = streaming(max_running_requests=2)
    for _ in range(10):
        harness.submit(prompt_len=300, max_new_tokens=30)
    harness.step()

    time = harness.last_pass.step_time
    assert time is not None and time.waiting_s == pytest.approx(300 * time.token_s)
    assert time.prompts_s == pytest.approx(time.target_s - time.decodes_s)


def test_many_waiting_prompts_are_worth_longer_steps():
    harness = streaming(max_running_requests=64)
    for _ in range(30):
        harness.submit(prompt_len=300, max_new_tokens=30)
    harness.step()

    time = harness.last_pass.step_time
    assert time is not None
    assert time.waiting_s == pytest.approx(30 * 300 * time.token_s)
    assert time.prompts_s == pytest.approx(time.waiting_s * 29 / 30)
    assert time.prompts_s > 4 * (time.target_s - time.decodes_s)
    harness.run_until_idle()
    last = passes(harness, ForwardMode.MIXED)[-1].step_time
    assert last is not None and last.prompts_s == pytest.approx(last.target_s - last.decodes_s)


def prompt_of(first: int, length: int) -> list[int]:
    return [1 + (first + 7 * position) % 89 for position in range(length)]


def waiting_tokens(harness: Harness) -> float:
    """The tokens of the waiting prompts in the pass of the last step."""
    time = harness.last_pass.step_time
    assert time is not None
    return time.waiting_s / time.token_s


def test_questions_about_one_input_are_one_prompt():
    harness = streaming(max_running_requests=64, radix_cache=True)
    pooling = PoolingParams(PoolingKind.LABELS, label_ids=(5, 6), shared_len=60)
    for number in range(20):
        harness.submit(prompt=prompt_of(0, 60) + prompt_of(number, 8), pooling=pooling)
    harness.step()
    time = harness.last_pass.step_time
    assert waiting_tokens(harness) == pytest.approx(60 + 20 * 8)
    assert time is not None and time.prompts_s == pytest.approx(time.target_s - time.decodes_s), "no queue"
    harness.step()
    assert waiting_tokens(harness) == pytest.approx(19 * 8), "the input is computed, and one question"
    harness.run_until_idle()


def test_parallel_samples_compute_their_prompt_once():
    harness = streaming(max_running_requests=64, radix_cache=True)
    for _ in range(8):
        harness.submit(prompt=prompt_of(0, 200), max_new_tokens=2, message={"group": "g"})
    harness.step()
    assert waiting_tokens(harness) == pytest.approx(200 + 7)
    harness.run_until_idle()


def test_parallel_samples_that_were_begun_compute_their_own_tokens():
    """As after a crash, or a retraction whose pages are evicted."""
    harness = streaming(max_running_requests=64, radix_cache=True)
    for number in range(4):
        begun = prompt_of(number, 50)
        sample = {"group": "g"}
        harness.submit(prompt=prompt_of(0, 100), max_new_tokens=60, delivered=begun, message=sample)
    harness.step()
    assert waiting_tokens(harness) == pytest.approx(100 + 4 * 50)


def test_what_is_cached_does_not_wait_to_be_computed():
    harness = streaming(max_running_requests=64, radix_cache=True)
    harness.submit(prompt=prompt_of(0, 400), max_new_tokens=1)
    harness.step()
    while harness.scheduler._parts.requests.partial:
        harness.step()
    for number in range(6):
        harness.submit(prompt=prompt_of(0, 400) + prompt_of(number, 9), max_new_tokens=2)
    harness.step()
    assert waiting_tokens(harness) == pytest.approx(6 * 9)
    harness.run_until_idle()


@pytest.mark.parametrize("num_slow", [1, 3])
def test_first_decodes_that_take_seconds_do_not_make_prompts_look_cheap(num_slow):
    """They compile, or touch memory for the first time; and a long prompt is there before one that does not."""
    harness = make_harness(costs := Costs())
    slow: list[int] = []

    def seconds(plan: StepPlan) -> float:
        if plan.mode is ForwardMode.DECODE and len(slow) < num_slow:
            slow.append(plan.step_id)
            return 3.0
        return costs.of(plan)

    harness.runner.step_s = seconds
    harness.submit("streams", prompt_len=8, max_new_tokens=200)
    while len(slow) < num_slow:
        harness.step()
    harness.submit("first", prompt_len=600, max_new_tokens=3)
    while "first" not in [req.rid for req in harness.scheduler._parts.requests.running.reqs]:
        harness.step()
    harness.submit("second", prompt_len=600, max_new_tokens=3)
    mixed = [batch for batch in harness.run_until_idle() if batch.plan.mode is ForwardMode.MIXED]
    assert len(mixed) >= 5
    assert max(costs.of(batch.plan) for batch in mixed) < 0.06


def test_without_a_target_time_is_no_limit():
    harness = make_harness(Costs(), target_step_ms=0.0)
    warm_up(harness)
    harness.submit("streams", prompt_len=5, max_new_tokens=60)
    harness.step()
    harness.submit("long", prompt_len=600, max_new_tokens=2)
    mixed = [batch for batch in harness.run_until_idle() if batch.plan.mode is ForwardMode.MIXED]
    assert not any(record.step_time for record in harness.scheduler.decisions.passes)
    assert max(batch.plan.total_num_scheduled_tokens for batch in mixed) > 500


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    costs=st.builds(
        Costs,
        step_s=st.floats(1e-4, 0.5),
        decode_s=st.floats(0, 0.01),
        token_s=st.floats(1e-5, 0.02),
        pair_s=st.floats(0, 1e-5),
    ),
    target_ms=st.floats(1.0, 500.0),
    partial=st.sampled_from([1, 3]),
    radix_cache=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_steps_are_as_long_as_predicted_allows_and_nobody_starves(
    costs, target_ms, partial, radix_cache, seed
):
    """The books, the verdicts and every answer are checked by the harness after each step."""
    rng = random.Random(seed)
    harness = make_harness(
        costs,
        num_pages=200,
        max_model_len=400,
        max_running_requests=5,
        target_step_ms=target_ms,
        max_num_partial_prefills=partial,
        radix_cache=radix_cache,
    )
    batches: list[tuple[PassRecord, ScheduleBatch]] = []
    for _ in range(60):
        if rng.random() < 0.2:
            harness.submit(prompt_len=rng.randint(1, 300), max_new_tokens=rng.randint(1, 40))
        if (batch := harness.step()) is not None:
            batches.append((harness.last_pass, batch))
    harness.run_until_idle()

    for record, batch in batches:
        time = record.step_time
        prompt_tokens = sum(ints(batch.plan.num_scheduled_tokens)[: batch.num_extends])
        if time is None or not batch.num_extends:
            continue
        assert prompt_tokens > 0
        assert time.prompts_s >= max(
            time.target_s - time.decodes_s, time.decodes_s, time.waiting_s / MAX_PASSES
        )
        assert time.left_s >= -1e-9 or prompt_tokens <= PAGE, "longer than predicted allows"
