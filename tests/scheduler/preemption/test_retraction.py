"""Tests of `scheduler/decodes.py`: what happens when memory runs out."""

import pytest

from engine.runtime.messages import FinishKind
from engine.scheduler.records.verdict import Reason


def retractions(harness):
    """Rids of each pass that retracted somebody."""
    return [record.retracted for record in harness.scheduler.decisions.passes if record.retracted]


@pytest.fixture
def crowded(make_scheduler):
    """Two requests that together need more than there is: "a" is expected to stop early and does not."""

    def make(**options):
        options = {"num_pages": 16, "page_size": 4, "schedule_conservativeness": 0.01, "eos": ()} | options
        harness = make_scheduler(**options)
        harness.submit("a", prompt_len=8, max_new_tokens=48, ignore_eos=False)
        harness.step()
        harness.submit("b", prompt_len=12, max_new_tokens=30, ignore_eos=False)
        return harness

    return make


def run_to_retraction(harness):
    for _ in range(100):
        harness.step()
        if harness.last_pass.retracted:
            return
    raise AssertionError("memory did not run out")


def test_the_victim_has_the_shortest_output_then_the_longest_input(make_scheduler):
    harness = make_scheduler(num_pages=32, page_size=4, schedule_conservativeness=0.01, eos=())
    harness.submit("old", prompt_len=8, max_new_tokens=110, ignore_eos=False)
    harness.step()
    harness.submit("long", prompt_len=12, max_new_tokens=40, ignore_eos=False)
    harness.submit("short", prompt_len=4, max_new_tokens=40, ignore_eos=False)

    run_to_retraction(harness)

    assert harness.last_pass.retracted == ["long"]
    harness.run_until_idle()
    assert all("old" not in rids for rids in retractions(harness))


def test_eviction_goes_before_retraction(make_scheduler):
    harness = make_scheduler(num_pages=12, page_size=4)
    harness.submit(prompt_len=24, max_new_tokens=1)
    harness.run_until_idle()
    assert harness.pages().cached == 6

    harness.submit(prompt_len=8, max_new_tokens=40)
    harness.run_until_idle()

    assert retractions(harness) == []
    assert harness.scheduler.report(0.0).totals.evicted_tokens > 0


def test_a_retracted_request_goes_back_to_its_place_of_arrival(crowded):
    harness = crowded(max_running_requests=2)
    harness.submit("c", prompt_len=12, max_new_tokens=30, ignore_eos=False)
    run_to_retraction(harness)
    assert harness.last_pass.retracted == ["b"]

    harness.step()

    assert harness.last_pass.verdicts[0].rid == "b"
    harness.run_until_idle()
    assert harness.answers["b"].rows[-1].usage.num_retractions == 1


def test_nobody_is_admitted_in_a_pass_that_retracts(crowded):
    harness = crowded(max_running_requests=2)
    harness.submit("c", prompt_len=1, max_new_tokens=1)

    run_to_retraction(harness)

    record = harness.last_pass
    assert (record.verdicts, record.num_rest, record.rest_reason) == ([], 2, Reason.RETRACTING)
    harness.run_until_idle()


def test_retraction_raises_the_ratio_and_idleness_resets_it(crowded):
    harness = crowded()
    start = harness.scheduler.report(0.0).new_token_ratio

    run_to_retraction(harness)

    generated = harness.answers["a"].rows[-2].usage.completion_tokens  # the last row is of this step
    assert harness.scheduler.report(0.0).new_token_ratio == pytest.approx((generated + 20) / (48 + 1))
    harness.run_until_idle()
    assert harness.scheduler.report(0.0).new_token_ratio == pytest.approx(start, rel=0.01)


def test_what_a_victim_computed_stays_in_the_cache_while_nobody_needs_it(crowded):
    harness = crowded()
    run_to_retraction(harness)
    harness.run_until_idle()

    first, *_, again = harness.verdicts_about("b")
    assert first.prefix_len == 0
    assert again.prefix_len > 0


def test_cached_tokens_count_the_first_admission_only(crowded):
    harness = crowded()
    harness.run_until_idle()

    assert harness.answers["b"].rows[-1].usage.num_retractions > 0
    assert harness.answers["b"].rows[-1].usage.cached_tokens == 0
    assert harness.scheduler.report(0.0).totals.cached_tokens == 0
    assert harness.scheduler.report(0.0).totals.prompt_tokens == 20


def test_steps_in_flight_are_waited_for_instead_of_retracting(make_scheduler):
    """The last token of "a" is in flight and its pages come back with it, so "b" only misses a step."""
    harness = make_scheduler(num_pages=16, page_size=4, overlap=1, radix_cache=False)
    harness.submit("a", prompt_len=8, max_new_tokens=2)
    harness.submit("b", prompt_len=7, max_new_tokens=10)
    harness.step()
    harness.step()
    allocator = harness.allocator
    taken = allocator.allocate(allocator.num_free)  # the rest of the pool is used by others, let us say
    harness.scheduler.audit = lambda: None

    assert harness.step() is None  # "b" needs a page now; the step in flight is settled instead
    assert harness.answers["a"].finish is not None
    batch = harness.step()
    assert [req.rid for req in batch.reqs] == ["b"]

    allocator.free(taken)
    harness.run_until_idle()
    assert retractions(harness) == []


@pytest.mark.parametrize("overlap", [0, 1])
def test_the_last_one_that_cannot_fit_is_answered(make_scheduler, overlap):
    """Cannot happen while the page equation holds; here somebody has taken pages behind the scheduler's back."""
    harness = make_scheduler(num_pages=8, page_size=4, overlap=overlap)
    harness.scheduler.audit = lambda: None
    rid = harness.submit(prompt_len=8, max_new_tokens=20)
    harness.step()
    harness.allocator.allocate(5)

    for _ in range(30):
        harness.step()

    finish = harness.answers[rid].finish
    assert finish is not None and finish.kind is FinishKind.ERROR
    known = 13 - overlap  # tokens of a step in flight are not known yet
    assert f"it has {known} tokens and needs another page, 0 of 8 can be had" in finish.message


@pytest.mark.parametrize("phases", ["mixed", "prefill-first"])
def test_whoever_waits_runs_at_once_when_the_one_in_the_way_was_answered(make_scheduler, phases):
    """No empty step between: a loop that sees one would believe that there is nothing to do."""
    harness = make_scheduler(num_pages=8, page_size=4, max_running_requests=1, phases=phases)
    harness.scheduler.audit = lambda: None
    first = harness.submit(prompt_len=8, max_new_tokens=20)
    second = harness.submit(prompt_len=8, max_new_tokens=1)
    harness.step()
    harness.allocator.allocate(6)

    batch = harness.step()

    assert harness.answers[first].finish.kind is FinishKind.ERROR
    assert [req.rid for req in batch.reqs] == [second]


def test_among_equal_victims_the_latest_arrival_goes(make_scheduler):
    harness = make_scheduler(num_pages=32, page_size=4, schedule_conservativeness=0.01, eos=())
    harness.submit("old", prompt_len=8, max_new_tokens=110, ignore_eos=False)
    harness.step()
    harness.submit("earlier", prompt_len=8, max_new_tokens=40, ignore_eos=False)
    harness.submit("later", prompt_len=8, max_new_tokens=40, ignore_eos=False)

    run_to_retraction(harness)

    assert harness.last_pass.retracted == ["later"]
    harness.run_until_idle()
