"""Steps for which the device has no memory: dropped, computed again in less, and nobody's tokens change."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.runtime.messages import FinishKind
from engine.runtime.step_plan import StepPlan
from engine.scheduler.journal.log_file import read_runs
from engine.scheduler.journal.replay import replay
from engine.scheduler.preemption.out_of_memory import FIRST_HOLD_S, MAX_TRIES
from engine.scheduler.records.decision_log import Settled
from engine.scheduler.records.verdict import Reason
from engine.scheduler.step_size.step_limits import (
    FIRST_PATIENCE,
    MOST_PATIENCE,
    PartialLimits,
    StepCaps,
    StepLimits,
)
from tests.scheduler.fake_runner import ints
from tests.scheduler.harness import Harness, extend_lens
from tests.scheduler.test_pipeline import LIVES, Piped
from tests.scheduler.test_pipeline import live as piped_life
from tests.scheduler.test_whole_scheduler import Life, configs, one_of
from tests.selection import examples


def in_steps(*step_ids: int) -> Callable[[StepPlan], bool]:
    return lambda plan: plan.step_id in step_ids


def beyond(most_tokens: int, most_requests: int = 1 << 30) -> Callable[[StepPlan], bool]:
    """A device that has memory for steps of this size."""
    return lambda plan: plan.total_num_scheduled_tokens > most_tokens or len(ints(plan.rows)) > most_requests


def caps_of(harness: Harness) -> StepCaps:
    return harness.scheduler._parts.settler._caps


# ------------------------------------------------------------ what becomes of a step


def test_a_prompt_that_does_not_fit_is_computed_in_smaller_and_smaller_chunks():
    harness = Harness(chunked_prefill_size=64)
    harness.runner.no_memory = beyond(20)
    harness.submit(prompt_len=60, max_new_tokens=3)

    steps = harness.run_until_idle()

    assert [extend_lens(step) for step in steps[:6]] == [[60], [28], [12], [12], [12], [12]]
    assert caps_of(harness).max_step_tokens == 14
    assert len(harness.answers["r0"].tokens) == 3


def test_a_prompt_that_is_never_cut_is_cut_then():
    harness = Harness(chunked_prefill_size=-1)
    harness.runner.no_memory = beyond(32)
    harness.submit(prompt_len=60, max_new_tokens=3)
    harness.run_until_idle()

    assert len(harness.answers["r0"].tokens) == 3


def test_decodes_that_do_not_fit_are_fewer_from_then_on():
    harness = Harness(num_pages=200)
    harness.runner.no_memory = beyond(1 << 30, most_requests=3)
    for _ in range(8):
        harness.submit(prompt_len=4, max_new_tokens=20)

    steps = harness.run_until_idle()

    assert caps_of(harness).max_running in (2, 3)
    assert max(len(step) for step in steps[-20:]) <= 3
    assert all(len(answer.tokens) == 20 for answer in harness.answers.values())


def test_who_lost_its_place_and_why_stands_in_the_decisions(caplog):
    harness = Harness()
    harness.runner.no_memory = in_steps(2)
    harness.submit("a", prompt_len=40, max_new_tokens=4)
    harness.submit("b", prompt_len=10, max_new_tokens=4)
    harness.run_until_idle()

    (settled,) = [each for each in harness.scheduler.decisions if getattr(each, "out_of_memory", "")]
    assert isinstance(settled, Settled)
    assert (settled.step_id, settled.out_of_memory) == (2, "tried to allocate 2 GiB")
    records = [record for record in harness.scheduler.decisions.passes if record.retractions]
    assert [(each.rid, each.mode, each.cause) for each in records[0].retractions] == [
        ("a", "recompute", "device memory"),
        ("b", "recompute", "device memory"),
    ]
    text = "step 2 ran out of device memory (2 tokens of 2 requests, 0 of prompts); now at most 1 running requests"
    assert records[0].notes == [text]
    assert (
        text + "; lower --max-running-requests or --mem-fraction to avoid it: tried to allocate"
        in caplog.text
    )
    assert harness.scheduler.report(harness.now_s).totals.retracted_reqs == 2


def test_what_earlier_steps_have_computed_is_not_computed_again():
    harness = Harness(page_size=4, chunked_prefill_size=16)
    harness.runner.no_memory = in_steps(3)
    harness.submit(prompt_len=41, max_new_tokens=2)

    steps = harness.run_until_idle()

    assert [extend_lens(step) for step in steps[:5]] == [[16], [16], [9], [4], [4]]
    assert ints(steps[3].plan.num_computed_tokens) == [32]


def test_nothing_of_a_failed_step_is_in_the_prefix_cache():
    """The runner's memory holds garbage where the step would have written; whoever shares it is found out there."""
    harness = Harness(page_size=4)
    prompt = [1 + n % 50 for n in range(40)]
    harness.runner.no_memory = in_steps(1)
    harness.submit("first", prompt=prompt, max_new_tokens=3)
    harness.step()
    assert harness.pages() == (64, 0, 0)
    harness.submit("second", prompt=[*prompt, 7], max_new_tokens=3)
    harness.run_until_idle()


def test_log_probabilities_of_a_prompt_come_once_and_whole():
    harness = Harness(chunked_prefill_size=16)
    harness.runner.no_memory = in_steps(2)
    harness.submit(prompt_len=40, max_new_tokens=2, prompt_logprobs=0)
    harness.run_until_idle()

    (logprobs,) = [row.prompt_logprobs for row in harness.answers["r0"].rows if row.prompt_logprobs]
    assert np.frombuffer(logprobs.token_logprobs, dtype=np.float32).tolist() == list(range(1, 40))


# ------------------------------------------------------------ nothing smaller is left


def in_seconds(harness: Harness, from_s: float, to_s: float) -> Callable[[StepPlan], bool]:
    """Somebody else has the device's memory meanwhile."""
    return lambda plan: from_s <= harness.now_s < to_s


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("shortage_s", [0.05, 1.0, 5.0, 12.0])
@pytest.mark.parametrize("overlapped", [False, True])
def test_a_shortage_of_some_seconds_costs_nobody_an_answer(shortage_s, overlapped):
    harness = Piped(overlapped=overlapped, num_pages=400, max_running_requests=24)
    harness.runner.no_memory = in_seconds(harness, 100.05, 100.05 + shortage_s)
    for _ in range(24):
        harness.submit(prompt_len=20, max_new_tokens=60)
    harness.run()

    assert all(len(answer.tokens) == 60 for answer in harness.answers.values())
    assert harness.now_s < 100.0 + 2.5 * shortage_s + 25.0
    assert caps_of(harness).patience == FIRST_PATIENCE


def test_who_fails_alone_for_good_is_answered_after_its_last_try():
    harness = Harness(page_size=4)
    tries: list[float] = []

    def no_memory(plan: StepPlan) -> bool:
        if plan.total_num_scheduled_tokens:
            tries.append(harness.now_s)
        return len(tries) <= 11

    harness.runner.no_memory = no_memory
    harness.submit("doomed", prompt_len=30, max_new_tokens=3)
    for _ in range(6):
        harness.step()
    harness.submit("next", prompt_len=3, max_new_tokens=3)
    harness.run_until_idle()

    finish = harness.answers["doomed"].finish
    assert finish is not None and finish.kind is FinishKind.ERROR
    assert finish.message == (
        "the device has too little memory for the smallest step of this request (4 tokens of 1 requests, 4 of "
        "prompts; 8 tries): tried to allocate 2 GiB; lower --mem-fraction or --max-model-len"
    )
    assert len(harness.answers["next"].tokens) == 3
    alone = tries[11 - MAX_TRIES : 11]
    waits = [second - first for first, second in pairwise(alone)]
    assert waits == pytest.approx([FIRST_HOLD_S * 2**n for n in range(MAX_TRIES - 1)], abs=0.02)
    assert sum(waits) == pytest.approx(12.7, abs=0.1), "what the module promises"


def test_tries_count_only_while_it_does_not_get_further():
    """Single failures of a long life are none of a device that is too small for good."""
    harness = Harness()
    harness.runner.no_memory = lambda plan: plan.step_id % 3 == 0
    harness.submit(prompt_len=6, max_new_tokens=40)
    harness.run_until_idle()

    assert len(harness.answers["r0"].tokens) == 40


def test_while_nothing_is_computed_that_is_the_reason_to_wait():
    harness = Harness()
    harness.runner.no_memory = in_seconds(harness, 0.0, 100.3)
    harness.submit(prompt_len=3, max_new_tokens=2)
    for _ in range(4):
        harness.step()

    wake_s = harness.scheduler.wake_s()
    assert wake_s is not None and harness.now_s < wake_s <= harness.now_s + FIRST_HOLD_S
    assert harness.last_pass.rest_reason is Reason.NO_DEVICE_MEMORY
    for _ in range(20):
        harness.scheduler.on_idle()
    assert not harness.scheduler.report(harness.now_s).stalled
    harness.run_until_idle()
    assert harness.scheduler.wake_s() is None


def test_a_request_may_leave_while_nothing_is_computed():
    harness = Harness()
    harness.runner.no_memory = in_seconds(harness, 0.0, 100.3)
    harness.submit("a", prompt_len=3, max_new_tokens=2, message={"timeout_s": 0.05})
    harness.submit("b", prompt_len=3, max_new_tokens=2)
    harness.run_until_idle()

    finish = harness.answers["a"].finish
    assert finish is not None and finish.kind is not FinishKind.LENGTH
    assert len(harness.answers["b"].tokens) == 2


def test_warnings_are_few_and_notes_are_complete(caplog):
    harness = Harness(num_pages=200)
    harness.runner.no_memory = in_seconds(harness, 100.0, 103.0)
    for _ in range(8):
        harness.submit(prompt_len=20, max_new_tokens=4)
    harness.run_until_idle()

    notes = [note for record in harness.scheduler.decisions.passes for note in record.notes]
    assert len([note for note in notes if "ran out of device memory" in note]) > 8
    assert caplog.text.count("ran out of device memory") == 1


@pytest.mark.parametrize(
    ("num_requests", "num_prompt_tokens", "flag"),
    [(3, 5, "--chunked-prefill-size"), (3, 4, "--max-running-requests"), (8, 0, "--max-running-requests")],
)
def test_the_advice_names_what_was_lowered(caplog, num_requests, num_prompt_tokens, flag):
    harness = Harness(page_size=4, num_pages=200)
    if num_prompt_tokens:  # of one prompt, beside decodes
        num_requests -= 1
    for _ in range(num_requests):
        harness.submit(prompt_len=4, max_new_tokens=20)
    harness.step()
    if num_prompt_tokens:
        harness.submit(prompt_len=num_prompt_tokens, max_new_tokens=2)
    harness.runner.no_memory = in_steps(2)
    harness.run_until_idle()
    assert f"lower {flag} or --mem-fraction" in caplog.text


def test_no_more_run_than_the_cap_allows():
    harness = Harness(num_pages=200)
    harness.runner.no_memory = in_steps(2)
    for _ in range(8):
        harness.submit(prompt_len=4, max_new_tokens=9)

    steps = harness.run_until_idle()

    assert max(len(step) for step in steps[2:]) == 4


def test_places_that_are_taken_while_too_many_run_are_nobody_elses():
    harness = Harness(num_pages=24, page_size=4, schedule_policy="priority")
    for _ in range(6):
        harness.submit(prompt_len=12, max_new_tokens=4)
    harness.step()
    caps_of(harness).max_running = 2
    harness.submit("urgent", prompt_len=30, max_new_tokens=2, message={"priority": 100})
    harness.submit("other", prompt_len=3, max_new_tokens=2)
    harness.step()

    assert "urgent" in [each.rid for each in harness.last_pass.verdicts if each.result == "continue"]
    assert len(harness.last_pass.retractions) >= 2
    assert "other" not in [each.rid for each in harness.last_pass.verdicts if each.result == "continue"]


def test_nothing_is_swapped_for_a_device_without_memory():
    """The copies would have to go through memory that it lacks."""
    harness = Harness(num_host_pages=40, preemption_mode="swap")
    harness.runner.no_memory = in_steps(3)
    for _ in range(3):
        harness.submit(prompt_len=20, max_new_tokens=9)
    harness.run_until_idle()

    retractions = [each for record in harness.scheduler.decisions.passes for each in record.retractions]
    assert [each.mode for each in retractions] == ["recompute"] * 3


def test_a_single_decode_gets_a_second_try():
    harness = Harness()
    harness.runner.no_memory = in_steps(3)
    harness.submit(prompt_len=6, max_new_tokens=9)
    harness.run_until_idle()

    assert len(harness.answers["r0"].tokens) == 9


# ------------------------------------------------------------ overlap


@pytest.mark.parametrize("failing", range(1, 9))
def test_the_step_behind_a_failed_one_is_dropped(failing):
    harness = Piped(overlapped=True, seed=1, chunked_prefill_size=8, num_pages=128)
    harness.runner.no_memory = in_steps(failing)
    for n in range(3):
        harness.submit(prompt_len=5 + 9 * n, max_new_tokens=6)
    harness.run()

    assert all(len(answer.tokens) == 6 for answer in harness.answers.values())


def test_a_failed_step_behind_a_failed_one_changes_nothing_more():
    harness = Piped(overlapped=True, num_pages=128)
    for _ in range(8):
        harness.submit(prompt_len=4, max_new_tokens=9)
    for _ in range(3):
        harness.advance()
    harness.runner.no_memory = in_steps(4, 5)
    harness.run()

    assert caps_of(harness).max_running == 4, "not 2"


def test_whoever_joined_behind_the_failed_step_stays():
    harness = Piped(overlapped=True, num_pages=128)
    harness.submit("old", prompt_len=4, max_new_tokens=20)
    for _ in range(3):
        harness.advance()
    harness.runner.no_memory = in_steps(4)
    harness.advance()
    harness.submit("new", prompt_len=4, max_new_tokens=20)
    harness.run()

    retracted = [rid for record in harness.scheduler.decisions.passes for rid in record.retracted]
    assert retracted == ["old"]


# ------------------------------------------------------------ caps


def limits(**changes: Any) -> StepLimits:
    return StepLimits(
        chunk_size=64,
        max_prefill_tokens=200,
        max_num_batched_tokens=None,
        decodes_first=False,
        partial=PartialLimits(),
        look_ahead=0,
        num_lookahead_tokens=0,
    )._replace(**changes)


def caps(**changes: Any) -> StepCaps:
    return StepCaps(limits(**changes), page_size=4, num_rows=8, max_model_len=512)


def steps_until_lifted(each: StepCaps) -> int:
    num_steps = 0
    while each.text():
        each.succeeded()
        num_steps += 1
    return num_steps


def test_caps_come_back_after_a_while_without_failures():
    each = caps(chunk_size=128)
    assert each.failed(3, 60, 62) == "--chunked-prefill-size" and each.max_step_tokens == 31
    assert each.failed(8, 0, 8) == "--max-running-requests" and each.max_running == 4
    for _ in range(FIRST_PATIENCE):
        each.succeeded()
    assert [each.max_step_tokens, each.max_running] == [62, None]
    assert steps_until_lifted(each) == 2 * FIRST_PATIENCE


def test_many_failures_on_end_are_one_trouble():
    each = caps()
    while each.failed(each.max_running or 8, 0, 8) != "":
        pass
    assert each.max_running == 1
    assert steps_until_lifted(each) == 3 * FIRST_PATIENCE


def test_each_failed_probe_makes_the_while_longer_up_to_a_bound():
    each = caps()
    waits = []
    for _ in range(12):
        each.failed(8, 0, 8)
        waits.append(steps_until_lifted(each))
    assert waits[:4] == [100, 200, 400, 800]
    assert waits[-1] == MOST_PATIENCE


def test_when_the_configured_limits_hold_again_all_is_forgotten():
    each = caps()
    for _ in range(5):
        each.failed(8, 0, 8)
        steps_until_lifted(each)
    for _ in range(each.patience):
        each.succeeded()
    each.failed(8, 0, 8)
    assert steps_until_lifted(each) == FIRST_PATIENCE


def test_steps_that_compute_nothing_prove_nothing():
    harness = Harness(chunked_prefill_size=8)
    harness.runner.no_memory = in_steps(1)
    for _ in range(FIRST_PATIENCE):  # each leaves with a step that has the runner forget it
        harness.submit(prompt_len=8, max_new_tokens=1)
        harness.run_until_idle()
        if not caps_of(harness).text():
            break
    assert len(harness.answers) == FIRST_PATIENCE // 2, "two chunks each"


def test_a_step_is_smallest_only_when_nobody_else_may_run():
    each = caps()
    assert each.failed(1, 4, 4) == "--max-running-requests", "others may have been on the device"
    assert each.failed(1, 4, 4) == ""
    assert each.failed(1, 8, 8) == "--chunked-prefill-size", "a page is less"


@pytest.mark.parametrize(
    ("changes", "largest"),
    [
        ({}, 64),
        ({"chunk_size": 300}, 200),
        ({"chunk_size": None}, 512),
        ({"chunk_size": None, "max_prefill_tokens": 600}, 600),
        ({"chunk_size": 1}, 4),
    ],
)
def test_caps_begin_below_the_largest_step_and_end_there(changes, largest):
    each = caps(**changes)
    each.failed(8, 1000, 1000)
    assert each.max_step_tokens == max(4, largest // 2), "a step of decodes is not what is halved"
    assert steps_until_lifted(each) == FIRST_PATIENCE


def test_a_cap_bounds_prompts_cut_or_not():
    assert limits().capped(16)[:2] == (16, 16)
    assert limits(chunk_size=None).capped(100)[:2] == (100, 100)
    assert limits(chunk_size=8, max_prefill_tokens=4).capped(16)[:2] == (8, 4)
    assert limits().capped(None) == limits()


# ------------------------------------------------------------ lives


@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.too_slow])
@given(
    config=configs(),
    seed=st.integers(0, 2**32),
    most_tokens=st.integers(0, 40),
    most_requests=one_of(1, 2, 5, 100),
    chance=one_of(0.0, 0.05),
)
def test_any_life_on_a_device_that_is_too_small(config, seed, most_tokens, most_requests, chance):
    """Whoever can run in steps of a page finishes with his own tokens, whatever else fails by size or by chance."""
    life = Life(Harness(**config), seed)
    too_large = beyond(config["page_size"] + most_tokens, most_requests)
    rng = np.random.default_rng(seed)
    left = 5

    def no_memory(plan: StepPlan) -> bool:
        nonlocal left
        if too_large(plan):
            return True
        smallest = len(ints(plan.rows)) == 1 and plan.total_num_scheduled_tokens <= config["page_size"]
        if left and not smallest and rng.random() < chance:
            left -= 1
            return True
        return False

    life.harness.runner.no_memory = no_memory
    for _ in range(30):
        life.act()
    life.drain()
    for answer in life.harness.answers.values():
        assert answer.finish is not None
        assert "too little memory for the smallest step" not in answer.finish.message


@pytest.mark.slow
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(config=LIVES, seed=st.integers(0, 1 << 30), chance=one_of(0.03, 0.3))
def test_every_decision_about_failed_steps_can_be_made_again(tmp_path, config, seed, chance):
    path = tmp_path / "decisions.log"
    path.unlink(missing_ok=True)
    harness = Piped(overlapped=True, seed=seed, log=path, **config)
    rng = np.random.default_rng(seed)
    harness.runner.no_memory = lambda plan: bool(rng.random() < chance)
    piped_life(harness, seed, aborts=True)
    harness.recorder.close()

    (result,) = [replay(run) for run in read_runs(path)]
    assert result.difference is None, result
    assert not result.raised
