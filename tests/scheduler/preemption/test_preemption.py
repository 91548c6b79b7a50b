"""`preemption.py`: urgent requests preempt others, for all the places that they need or for none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.harness import Harness


def submit(harness, rid, priority, **kwargs):
    return harness.submit(rid, message={"priority": priority}, **kwargs)


def preempted(harness):
    return [
        each.rid
        for record in harness.scheduler.decisions.passes
        for each in record.retractions
        if each.cause == "priority"
    ]


def test_an_urgent_request_takes_the_row_of_the_least_urgent_newest(make_scheduler):
    harness = make_scheduler(schedule_policy="priority", max_running_requests=3)
    for rid, priority in (("a", 0), ("b", -20), ("c", -20)):
        submit(harness, rid, priority, max_new_tokens=20)
    harness.step()

    submit(harness, "urgent", 20)
    batch = harness.step()

    assert preempted(harness) == ["c"]
    assert [req.rid for req in batch.reqs] == ["urgent", "a", "b"]
    assert harness.scheduler.report(0.0).totals.preempted_reqs == 1
    harness.run_until_idle()


@pytest.mark.parametrize(("priority", "victims"), [(10, []), (11, ["runs"])])
def test_the_difference_must_exceed_the_threshold(make_scheduler, priority, victims):
    harness = make_scheduler(schedule_policy="priority", max_running_requests=1)
    submit(harness, "runs", 0, max_new_tokens=20)
    harness.step()
    submit(harness, "comes", priority)

    harness.run_until_idle()

    assert preempted(harness) == victims


def test_memory_is_freed_by_as_many_as_it_takes(make_scheduler):
    """18 pages of 4: three hold 4 pages each; the urgent one needs 9 and its output, so two must go."""
    harness = make_scheduler(
        schedule_policy="priority", page_size=4, num_pages=18, max_running_requests=8, radix_cache=False
    )
    for idx in range(3):
        submit(harness, f"low{idx}", 0, prompt_len=14, max_new_tokens=2)
    harness.step()
    submit(harness, "urgent", 20, prompt_len=34, max_new_tokens=3)

    batch = harness.step()

    assert "urgent" in [req.rid for req in batch.reqs]
    assert preempted(harness) == ["low2", "low1"]
    harness.run_until_idle()


def test_nobody_is_disturbed_when_it_would_not_suffice(make_scheduler):
    harness = make_scheduler(
        schedule_policy="priority", page_size=4, num_pages=16, max_running_requests=8, radix_cache=False
    )
    submit(harness, "equal", 20, prompt_len=30, max_new_tokens=8)
    submit(harness, "low", 0, prompt_len=8, max_new_tokens=8)
    harness.step()
    submit(harness, "urgent", 20, prompt_len=40, max_new_tokens=3)

    harness.step()

    assert preempted(harness) == []
    harness.run_until_idle()


def test_without_preemption_it_waits_its_turn(make_scheduler):
    harness = make_scheduler(schedule_policy="priority", max_running_requests=1, priority_preemption=False)
    submit(harness, "runs", -20, max_new_tokens=20)
    harness.step()
    submit(harness, "urgent", 20)

    harness.run_until_idle()

    assert preempted(harness) == []


def test_when_memory_runs_out_the_least_urgent_goes_first(make_scheduler):
    """By work lost it would be "urgent", which has generated nothing yet."""
    harness = make_scheduler(
        schedule_policy="priority",
        priority_preemption=False,
        page_size=4,
        num_pages=12,
        admission_estimator="none",
        radix_cache=False,
        eos=(),
    )
    submit(harness, "low", -20, prompt_len=10, max_new_tokens=30, ignore_eos=False)
    for _ in range(4):
        harness.step()
    submit(harness, "urgent", 0, prompt_len=10, max_new_tokens=30, ignore_eos=False)

    harness.run_until_idle()

    retracted = [rid for record in harness.scheduler.decisions.passes for rid in record.retracted]
    assert retracted and set(retracted) == {"low"}


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_preemption_changes_no_token_and_disturbs_only_lower_ones(data):
    page_size = data.draw(st.sampled_from([1, 4]))
    harness = Harness(
        schedule_policy="priority",
        priority_preemption_threshold=data.draw(st.sampled_from([0, 3])),
        priority_ageing=data.draw(st.sampled_from([0.0, 0.05])),
        page_size=page_size,
        num_pages=data.draw(st.integers(60, 160)) // page_size,
        num_host_pages=data.draw(st.sampled_from([0, 50])),
        max_running_requests=data.draw(st.integers(1, 5)),
        preemption_mode=data.draw(st.sampled_from(["swap", "recompute"])),
        radix_cache=data.draw(st.booleans()),
        overlap=data.draw(st.integers(0, 1)),
        phases=data.draw(st.sampled_from(["mixed", "prefill-first", "decode-first"])),
        chunked_prefill_size=data.draw(st.sampled_from([8, 64])),
    )
    priorities = {}
    for idx in range(data.draw(st.integers(1, 10))):
        priorities[f"r{idx}"] = data.draw(st.integers(0, 8))
        submit(
            harness,
            f"r{idx}",
            priorities[f"r{idx}"],
            prompt_len=data.draw(st.integers(1, 30)),
            max_new_tokens=data.draw(st.integers(1, 20)),
        )
        for _ in range(data.draw(st.integers(0, 3))):
            harness.step()
    harness.run_until_idle()
    for record in harness.scheduler.decisions.passes:
        victims = [each.rid for each in record.retractions if each.cause == "priority"]
        if victims:
            admitted = [verdict.rid for verdict in record.verdicts if verdict.result == "continue"]
            assert max(priorities[rid] for rid in admitted) > max(priorities[rid] for rid in victims)


def test_one_is_swapped_out_for_one_that_is_swapped_in_in_the_same_step(make_scheduler):
    """The copies out come before the copies in, so what makes place for a request on the host is swapped, too."""
    harness = make_scheduler(
        schedule_policy="priority",
        priority_preemption_threshold=0,
        priority_ageing=0.0,
        preemption_mode="swap",
        num_host_pages=64,
        max_running_requests=2,
        chaos="retract=1:1",
        policy_seed=3,  # which takes the place of "middle"
    )
    submit(harness, "middle", 5, prompt_len=8, max_new_tokens=20)
    submit(harness, "low", 1, prompt_len=8, max_new_tokens=20)
    harness.step()
    harness.step()
    assert [(each.rid, each.mode) for each in harness.last_pass.retractions] == [("middle", "swap")]
    submit(harness, "high", 9, prompt_len=8, max_new_tokens=20)  # goes before "middle", into its row

    harness.step()

    (retraction,) = harness.last_pass.retractions
    assert (retraction.rid, retraction.mode, retraction.cause) == ("low", "swap", "priority")
    assert [verdict.rid for verdict in harness.last_pass.verdicts] == ["high", "middle"]
    harness.run_until_idle()
