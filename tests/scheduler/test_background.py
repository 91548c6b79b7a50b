"""Tests of the background class: what it gets of rows, memory and steps beside interactive requests."""

from __future__ import annotations

import pytest

from engine.runtime.messages import FinishKind
from engine.scheduler.records.verdict import AddReqResult, Reason

BACKGROUND = {"background": True}


def submit_lines(harness, count, **options):
    return [harness.submit(f"line{i}", message=BACKGROUND, **options) for i in range(count)]


def live(harness, rid):
    return harness.scheduler._parts.requests.by_id.get(rid)


@pytest.mark.parametrize(
    "policy", ["fcfs", "lpm", "priority", "fair", "sjf", "round-robin", "adaptive", "hrrn"]
)
def test_under_any_policy_a_later_interactive_request_starts_first(make_scheduler, policy):
    harness = make_scheduler(schedule_policy=policy, max_running_requests=1)
    harness.submit("runs", max_new_tokens=3)
    harness.step()
    (line,) = submit_lines(harness, 1, max_new_tokens=2)
    harness.submit("late", max_new_tokens=2, prompt_len=16)

    harness.run_until_idle()

    started = [
        verdict.rid
        for record in harness.scheduler.decisions.passes
        for verdict in record.verdicts
        if verdict.result is AddReqResult.CONTINUE
    ]
    assert started == ["runs", "late", line]


def test_an_interactive_request_takes_a_row_at_once_and_the_line_gives_the_same_answer(make_scheduler):
    harness = make_scheduler(max_running_requests=2)
    lines = submit_lines(harness, 2, max_new_tokens=20)
    for _ in range(4):
        harness.step()
    harness.submit("late", max_new_tokens=2)

    harness.step()

    assert live(harness, "late").row >= 0
    assert [live(harness, rid).num_retractions for rid in lines] == [0, 1]
    assert harness.last_pass.retractions[0].cause == "background"
    harness.run_until_idle()
    assert {harness.answers[rid].finish.kind for rid in lines} == {FinishKind.LENGTH}


def test_memory_is_taken_from_lines_before_any_interactive_request_is_retracted(make_scheduler):
    harness = make_scheduler(
        num_pages=24, page_size=4, max_model_len=96, schedule_conservativeness=0.01, max_running_requests=4
    )
    options = {"prompt_len": 8, "max_new_tokens": 40, "min_new_tokens": 40, "ignore_eos": False}
    lines = submit_lines(harness, 2, **options)
    for _ in range(12):
        harness.step()
    harness.submit("first", **options)
    harness.submit("second", **options)

    harness.run_until_idle()

    retracted = [rid for record in harness.scheduler.decisions.passes for rid in record.retracted]
    assert retracted and set(retracted) <= set(lines)


def test_a_request_that_needs_the_whole_pool_starts_beside_lines(make_scheduler):
    """The estimate has margins that would refuse it for ever; once all lines have left, it is alone."""
    harness = make_scheduler(num_pages=16, page_size=4, max_model_len=64)
    submit_lines(harness, 2, prompt_len=8, max_new_tokens=16)
    for _ in range(3):
        harness.step()
    harness.submit("whole", prompt_len=40, max_new_tokens=24, ignore_eos=True)

    harness.step()

    assert live(harness, "whole").row >= 0
    harness.run_until_idle()


def test_lines_wait_while_another_request_lacks_memory(make_scheduler):
    harness = make_scheduler(num_pages=16, page_size=4, max_model_len=64)
    harness.submit("runs", prompt_len=20, max_new_tokens=20)
    harness.step()
    harness.submit("waits", prompt_len=20, max_new_tokens=20)
    (line,) = submit_lines(harness, 1, prompt_len=4, max_new_tokens=2)

    harness.step()

    assert harness.verdicts_about("waits")[-1].reason is Reason.NO_KV
    assert harness.last_pass.rest_reason is Reason.BACKGROUND
    assert live(harness, line).row < 0
    harness.run_until_idle()


def test_tenants_share_the_background_fairly(make_scheduler):
    harness = make_scheduler(max_running_requests=1)
    for i in range(4):
        harness.submit(f"a{i}", message=BACKGROUND | {"tenant": "a"}, max_new_tokens=4)
    harness.submit("b0", message=BACKGROUND | {"tenant": "b"}, max_new_tokens=4)

    harness.run_until_idle()

    order = list(
        dict.fromkeys(
            verdict.rid
            for record in harness.scheduler.decisions.passes
            for verdict in record.verdicts
            if verdict.reason is not Reason.NO_ROW
        )
    )
    assert order.index("b0") < order.index("a2")


def test_lines_have_no_time_limits_of_the_server(make_scheduler):
    harness = make_scheduler(max_running_requests=1, queue_timeout=0.05, request_timeout=0.1)
    (line,) = submit_lines(harness, 1, max_new_tokens=40)

    harness.run_until_idle()

    assert harness.answers[line].finish.kind is FinishKind.LENGTH


@pytest.mark.parametrize("phases", ["mixed", "prefill-first", "decode-first"])
def test_pages_of_a_finished_line_are_evicted_first(make_scheduler, phases):
    harness = make_scheduler(num_pages=16, page_size=4, phases=phases, max_num_batched_tokens=64)
    prompt = list(range(1, 25))
    harness.submit("kept", prompt=prompt, max_new_tokens=1)
    harness.run_until_idle()
    submit_lines(harness, 1, prompt_len=24, max_new_tokens=1)
    harness.run_until_idle()
    harness.submit("other", prompt_len=28, max_new_tokens=1)
    harness.run_until_idle()

    again = harness.submit("again", prompt=prompt, max_new_tokens=1)
    harness.run_until_idle()

    assert harness.answers[again].rows[-1].usage.cached_tokens == 20


def test_a_prefix_that_only_lines_have_used_is_evicted_first(make_scheduler):
    """However many of them: when the last has ended, no line shares it."""
    harness = make_scheduler(num_pages=20, page_size=4, max_running_requests=1)
    prompt = list(range(1, 25))
    harness.submit("kept", prompt=prompt, max_new_tokens=1)
    harness.run_until_idle()
    for start in (30, 60):
        shared = list(range(start, start + 20))
        for end in (1, 2, 3):
            harness.submit(prompt=[*shared, end, 4, 5, 6], message=BACKGROUND, max_new_tokens=1)
        harness.run_until_idle()
    harness.submit("other", prompt_len=40, max_new_tokens=1)
    harness.run_until_idle()

    again = harness.submit("again", prompt=prompt, max_new_tokens=1)
    harness.run_until_idle()

    assert harness.answers[again].rows[-1].usage.cached_tokens == 20


def test_lines_in_prefix_order_compute_each_prefix_once(make_scheduler):
    """In a pool that holds two of the prefixes beside interactive requests, of which one comes now and then."""
    harness = make_scheduler(num_pages=64, page_size=4, max_running_requests=4)
    num_prefixes, num_lines, num_own = 8, 6, 6
    prefixes = [harness.rng.integers(1, 97, 64).tolist() for _ in range(num_prefixes)]
    rids: list[str] = []
    for prefix in prefixes:
        for _ in range(num_lines):
            own = harness.rng.integers(1, 97, num_own).tolist()
            rids.append(harness.submit(prompt=prefix + own, message=BACKGROUND, max_new_tokens=8))
            while sum(harness.answers[rid].finish is None for rid in rids) >= 16:  # 4 x rows are in flight
                for _ in range(6):
                    harness.step()
                harness.submit(prompt_len=100, max_new_tokens=4)
    harness.run_until_idle()

    usages = [harness.answers[rid].rows[-1].usage for rid in rids]
    computed = sum(usage.prompt_tokens - usage.cached_tokens for usage in usages)
    least = num_prefixes * (64 + num_lines * num_own)
    assert computed <= 1.05 * least


def test_a_waiting_interactive_request_starts_in_the_pass_that_retracts_a_line_for_a_decode(make_scheduler):
    def running():
        """A line and two interactive requests, which will not fit together."""
        limits = {"page_size": 4, "num_pages": 26, "max_model_len": 64, "max_running_requests": 4}
        harness = make_scheduler(**limits, schedule_conservativeness=0.01, eos=())
        options = {"prompt_len": 8, "max_new_tokens": 40, "ignore_eos": False}
        submit_lines(harness, 1, **options)
        for _ in range(24):
            harness.step()
        for rid in ("first", "second"):
            harness.submit(rid, **options)
            harness.step()
            assert not harness.last_pass.retractions
        return harness

    harness, num_steps = running(), 0
    while not harness.last_pass.retractions:
        assert harness.step()
        num_steps += 1
    again = running()
    for _ in range(num_steps - 1):
        again.step()
    again.submit("late", prompt_len=4, max_new_tokens=2)

    again.step()

    assert {each.cause for each in again.last_pass.retractions} == {"background"}
    assert [each.rid for each in again.last_pass.retractions] == [
        each.rid for each in harness.last_pass.retractions
    ]
    assert live(again, "late").row >= 0
