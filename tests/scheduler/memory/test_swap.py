"""Tests of swapping: a request that was retracted comes back with its KV from the host, and nobody notices.

The FakeRunner's KV is a hash of all tokens before, so a page that comes back wrong is seen at the first step that reads
it; the harness compares every answer with the one the request gets alone.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.runtime.messages import FinishKind
from engine.scheduler.pass_state import PASSES_BEFORE_ALARM
from engine.scheduler.preemption.preemption import ByCost
from engine.scheduler.records.verdict import AddReqResult, Reason, Verdict
from tests.scheduler.harness import Harness, extend_lens


def retractions(harness):
    return [each for record in harness.scheduler.decisions.passes for each in record.retractions]


def crowded(make_scheduler, **settings):
    """Two requests that outgrow a pool of 16 pages together."""
    harness = make_scheduler(
        page_size=4, num_pages=16, num_host_pages=16, admission_estimator="none", eos=(), **settings
    )
    for rid in ("old", "young"):
        harness.submit(rid, prompt_len=16, max_new_tokens=32, ignore_eos=False)
        harness.step()
    return harness


def test_a_swapped_request_computes_nothing_again(make_scheduler):
    harness = crowded(make_scheduler, preemption_mode="swap", radix_cache=False)

    steps = harness.run_until_idle()

    assert {each.mode for each in retractions(harness)} == {"swap"}
    extended = [length for step in steps for length in extend_lens(step)]
    assert extended == [1] * len(
        retractions(harness)
    )  # the two prompts were computed before: here, one token each
    report = harness.scheduler.report(0.0)
    assert report.totals.swapped_in_tokens == report.totals.swapped_out_tokens > 0
    assert (report.host.used_tokens, report.host.total_tokens) == (0, 64)


def test_recompute_computes_it_all_again(make_scheduler):
    harness = crowded(make_scheduler, preemption_mode="recompute", radix_cache=False)

    steps = harness.run_until_idle()

    assert {each.mode for each in retractions(harness)} == {"recompute"}
    assert sum(length for step in steps for length in extend_lens(step)) > 20


def test_what_is_still_cached_is_not_copied_back(make_scheduler):
    harness = make_scheduler(
        page_size=4, num_pages=64, num_host_pages=64, preemption_mode="swap", chaos="retract=1:1"
    )
    harness.submit("r", prompt_len=42, max_new_tokens=4)
    harness.step()  # the prompt: ten pages and two tokens
    harness.step()  # out: eleven pages

    report = harness.scheduler.report(0.0)
    assert report.totals.swapped_out_tokens == 44
    harness.run_until_idle()
    assert harness.scheduler.report(0.0).totals.swapped_in_tokens == 4  # the cache had kept ten of them


def test_without_room_on_the_host_it_is_computed_again(make_scheduler):
    harness = make_scheduler(
        page_size=4, num_pages=64, num_host_pages=3, preemption_mode="swap", chaos="retract=1:2"
    )
    harness.submit("r", prompt_len=16, max_new_tokens=4)

    harness.run_until_idle()

    assert [each.mode for each in retractions(harness)] == ["recompute"] * 2


def test_those_on_the_host_come_before_new_prompts(make_scheduler):
    harness = crowded(make_scheduler, preemption_mode="swap")
    while not retractions(harness):
        harness.step()
    victim = retractions(harness)[0].rid
    harness.submit("new", prompt_len=4, max_new_tokens=1)

    while True:
        harness.step()
        first = harness.last_pass.verdicts[0] if harness.last_pass.verdicts else None
        if first is None or first.reason is Reason.NO_KV:
            assert first is None or first.rid == victim
            assert not harness.answers["new"].rows
            continue
        assert (first.rid, first.reason) == (victim, Reason.SWAPPED_IN)
        break
    harness.run_until_idle()


def test_an_abort_while_swapped_frees_the_host(make_scheduler):
    harness = crowded(make_scheduler, preemption_mode="swap")
    while not harness.scheduler.report(0.0).num_swapped_reqs:
        harness.step()
    assert harness.scheduler.report(0.0).host.used_tokens > 0

    harness.abort(retractions(harness)[0].rid)

    assert harness.scheduler.report(0.0).host.used_tokens == 0
    harness.run_until_idle()


def test_prompt_logprobs_that_are_not_sent_yet_need_the_prompt_again(make_scheduler):
    harness = make_scheduler(
        num_pages=64, num_host_pages=64, preemption_mode="swap", chaos="retract=1:1", chunked_prefill_size=8
    )
    harness.submit("r", prompt_len=20, max_new_tokens=2, prompt_logprobs=0)

    harness.run_until_idle()

    assert [each.mode for each in retractions(harness)] == ["recompute"]
    assert len(harness.answers["r"].rows[0].prompt_logprobs.token_logprobs) == 19 * 4


def test_the_cheaper_way_is_taken():
    mode = ByCost(page_bytes=1 << 20)
    assert not mode.swaps(1000, 63)  # nothing is known about computing yet
    mode.measured_prefill(
        1000, 0.1
    )  # 0.1 ms a token: 100 ms for a thousand, 63 pages out and back take 13 ms
    assert mode.swaps(1000, 63)
    for _ in range(40):
        mode.measured_swap(10, 0.1)  # but it turns out to be 10 ms a page

    assert not mode.swaps(1000, 63)
    assert mode.swap_s_per_page == pytest.approx(0.01, rel=1e-3)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_swapping_changes_no_token_and_leaks_no_page(data):
    page_size = data.draw(st.sampled_from([1, 4, 16]))
    num_pages = data.draw(st.integers(48, 128)) // page_size + 1
    harness = Harness(
        page_size=page_size,
        num_pages=num_pages,
        num_host_pages=data.draw(st.sampled_from([2, 8, 200])),
        max_running_requests=data.draw(st.integers(1, 5)),
        preemption_mode=data.draw(st.sampled_from(["swap", "cost"])),
        schedule_conservativeness=data.draw(st.sampled_from([0.01, 1.0])),
        radix_cache=data.draw(st.booleans()),
        overlap=data.draw(st.integers(0, 1)),
        phases=data.draw(st.sampled_from(["mixed", "prefill-first", "decode-first"])),
        chaos=data.draw(st.sampled_from([None, "retract=0.3:10"])),
        chunked_prefill_size=data.draw(st.sampled_from([16, 64])),
    )
    rids = []
    for _ in range(data.draw(st.integers(1, 8))):
        prompt_len = data.draw(st.integers(1, 30))
        longest = min(20, num_pages * page_size - prompt_len + 1)
        rids.append(harness.submit(prompt_len=prompt_len, max_new_tokens=data.draw(st.integers(1, longest))))
        for _ in range(data.draw(st.integers(0, 4))):
            harness.step()
    if data.draw(st.booleans()):
        harness.abort(data.draw(st.sampled_from(rids)))
    harness.run_until_idle()
    assert harness.scheduler.report(0.0).host.used_tokens == 0
    kinds = {answer.finish and answer.finish.kind for answer in harness.answers.values()}
    assert kinds <= {FinishKind.LENGTH, FinishKind.ABORT}


def test_a_swapped_request_of_low_priority_keeps_no_urgent_one_waiting(make_scheduler):
    """The first urgent request swaps the low one out; the second comes while it is on the host, and goes before it."""
    harness = make_scheduler(
        schedule_policy="priority",
        preemption_mode="swap",
        num_host_pages=64,
        max_running_requests=2,
        priority_ageing=0.0,
    )
    for rid in ("low0", "low1"):
        harness.submit(rid, prompt_len=8, max_new_tokens=60, message={"priority": 0})
    harness.step()
    harness.submit("urgent0", prompt_len=8, max_new_tokens=60, message={"priority": 20})
    harness.step()
    assert harness.scheduler.report(0.0).num_swapped_reqs == 1
    harness.submit("urgent1", prompt_len=8, max_new_tokens=5, message={"priority": 20})

    harness.step()

    assert harness.answers["urgent1"].rows
    harness.run_until_idle()


def test_a_stall_is_repaired_also_while_somebody_is_on_the_host(make_scheduler, monkeypatch):
    harness = crowded(make_scheduler, preemption_mode="swap")
    while not harness.scheduler.report(0.0).num_swapped_reqs:
        harness.step()
    for rid in list(harness.answers):
        if rid not in retractions(harness)[0].rid:
            harness.abort(rid)
    monkeypatch.setattr(
        "engine.scheduler.admission.prefill_adder.PrefillAdder.add",
        lambda adder, req, *_: Verdict(req.rid, AddReqResult.NO_TOKEN, Reason.NO_KV, need=9, have=5),
    )
    for _ in range(PASSES_BEFORE_ALARM):
        harness.step()
        harness.scheduler.on_idle()

    assert "none can be admitted" in harness.scheduler.report(0.0).stalled
    monkeypatch.undo()
    harness.run_until_idle()


def test_with_unknown_costs_nothing_is_swapped():
    mode = ByCost(page_bytes=0)  # nobody has said how large a page is
    mode.measured_prefill(1000, 0.1)

    assert not mode.swaps(1000, 63)


def test_both_costs_are_learned_from_the_steps_that_ran(make_scheduler):
    """The FakeRunner's steps take 10 ms: of 32 prompt tokens, and of swapping out two pages of 16 tokens."""
    harness = make_scheduler(page_size=16, num_host_pages=16, preemption_mode="cost", chaos="retract=1:2")
    mode = harness.scheduler._parts.settler._mode
    before = mode.swap_s_per_page
    harness.runner.swap_s = 0.01
    harness.submit("r", prompt_len=32, max_new_tokens=6)

    harness.step()
    assert mode.prefill_s_per_token == pytest.approx(0.01 / 32)
    harness.run_until_idle()

    assert retractions(harness)[0].mode == "swap"
    assert mode.swap_s_per_page > 2 * before
