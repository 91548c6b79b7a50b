"""`parallel_samples.py`: n > 1 answers share their prompt's pages, and no answer sees the writes of another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.records.verdict import Reason
from tests.scheduler.harness import Harness, Pages, extend_lens
from tests.selection import examples


def submit_siblings(harness, count, prompt, **sampling):
    """ParallelSamples differ in their length limit only, so that they end at different times."""
    group = {"message": {"group": "g"}}
    return [
        harness.submit(f"s{idx}", prompt=prompt, max_new_tokens=4 + idx, **group, **sampling)
        for idx in range(count)
    ]


def test_one_computes_the_prompt_and_the_others_its_last_token(make_scheduler):
    harness = make_scheduler(page_size=4, num_pages=64)
    prompt = list(range(1, 39))  # nine pages, and two tokens in the tenth
    submit_siblings(harness, 3, prompt)

    first = harness.step()
    assert extend_lens(first) == [38]
    assert [verdict.reason for verdict in harness.last_pass.verdicts] == [
        Reason.ADMITTED_ALONE,
        Reason.SIBLING_PREFILLS,
        Reason.SIBLING_PREFILLS,
    ]
    second = harness.step()

    assert extend_lens(second) == [1, 1]
    assert len(second.plan.page_copies) // 8 == 2  # each copies the page that is only half the prompt's
    assert harness.pages() == Pages(free=64 - 9 - 3, cached=9, held=3)
    harness.run_until_idle()


def test_siblings_of_a_prompt_in_whole_pages_copy_nothing(make_scheduler):
    harness = make_scheduler(page_size=4)
    submit_siblings(harness, 2, list(range(1, 38)))  # nine pages and the token that is computed anyway

    harness.step()
    second = harness.step()

    assert (extend_lens(second), second.plan.page_copies) == ([1], b"")
    harness.run_until_idle()


def test_the_abort_of_one_frees_exactly_its_own(make_scheduler):
    harness = make_scheduler(page_size=4, num_pages=64)
    submit_siblings(harness, 3, list(range(1, 39)))
    harness.step()
    harness.step()
    before = harness.pages()

    harness.abort("s1")

    assert harness.pages() == Pages(before.free + 1, before.cached, before.held - 1)
    harness.abort("s0")
    harness.abort("s2")
    assert harness.pages().held == 0
    harness.run_until_idle()


def test_the_leader_may_go_before_the_others_start(make_scheduler):
    harness = make_scheduler(page_size=4)
    submit_siblings(harness, 3, list(range(1, 39)))
    harness.step()

    harness.abort("s0")

    steps = harness.run_until_idle()
    # s1 leads: its nine whole pages are cached, two tokens are recomputed. s2 copies its last page.
    assert [extend_lens(step) for step in steps][:2] == [[2], [1]]
    assert [len(harness.answers[rid].tokens) for rid in ("s1", "s2")] == [5, 6]


def test_without_a_cache_each_computes_its_own_prompt(make_scheduler):
    harness = make_scheduler(page_size=4, radix_cache=False)
    submit_siblings(harness, 2, list(range(1, 39)))

    steps = harness.run_until_idle()

    assert sum(sum(extend_lens(step)) for step in steps) == 2 * 38


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_siblings_never_see_each_others_writes(data):
    """The FakeRunner checks every token that a step reads; the harness, that each answer is the one it gets alone."""
    page_size = data.draw(st.sampled_from([1, 4, 16]))
    harness = Harness(
        page_size=page_size,
        num_pages=256 // page_size,
        chunked_prefill_size=data.draw(st.sampled_from([8, 32, 128])) // page_size * page_size or page_size,
        overlap=data.draw(st.integers(0, 1)),
        max_running_requests=data.draw(st.integers(1, 6)),
        phases=data.draw(st.sampled_from(["mixed", "prefill-first", "decode-first"])),
        chaos=data.draw(st.sampled_from([None, "retract=0.2:5"])),
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    for group in range(data.draw(st.integers(1, 3))):
        prompt = [int(token) for token in rng.integers(1, 97, data.draw(st.integers(1, 60)))]
        for idx in range(data.draw(st.integers(1, 4))):
            harness.submit(
                f"g{group}-{idx}",
                prompt=prompt,
                max_new_tokens=data.draw(st.integers(1, 12)),
                message={"group": f"g{group}"},
            )
    for _ in range(data.draw(st.integers(0, 5))):
        harness.step()
    if data.draw(st.booleans()) and "g0-0" in harness.scheduler._parts.requests.by_id:
        harness.abort("g0-0")
    harness.run_until_idle()


@pytest.mark.parametrize("phases", ["mixed", "prefill-first"])
def test_siblings_with_prompt_logprobs_compute_their_own(make_scheduler, phases):
    harness = make_scheduler(page_size=4, phases=phases)
    submit_siblings(harness, 2, list(range(1, 39)), prompt_logprobs=0)

    steps = harness.run_until_idle()

    assert sum(sum(extend_lens(step)) for step in steps) == 2 * 38


@pytest.mark.parametrize("prompt_len", [3, 4, 9, 38])
def test_a_late_sibling_with_prompt_logprobs_has_all_of_them(make_scheduler, prompt_len):
    harness = make_scheduler(page_size=16)
    message = {"message": {"group": "g"}}
    prompt = list(range(1, prompt_len + 1))
    harness.submit("a", prompt=prompt, max_new_tokens=9, prompt_logprobs=0, **message)
    harness.step()
    harness.submit("b", prompt=prompt, max_new_tokens=2, prompt_logprobs=0, **message)
    harness.run_until_idle()

    for rid in ("a", "b"):
        logprobs = harness.answers[rid].rows[0].prompt_logprobs
        assert logprobs is not None
        assert len(logprobs.token_logprobs) == 4 * (prompt_len - 1)


def two_siblings_and_an_urgent_one(make_scheduler):
    """The leader runs and its prompt is computed; then its sibling and an urgent request come."""
    harness = make_scheduler(
        schedule_policy="priority",
        priority_preemption_threshold=0,
        priority_ageing=0.0,
        admission_estimator="full",
        preemption_mode="recompute",
        page_size=4,
        num_pages=40,
        max_running_requests=4,
    )
    for _ in range(4):  # the last row keeps figures of a request that is gone
        harness.submit(prompt_len=30, max_new_tokens=2)
    harness.run_until_idle()
    harness.flush()
    prompt = [5 + idx % 7 for idx in range(27)]
    harness.submit("leader", prompt=prompt, max_new_tokens=80, message={"group": "g"})
    for _ in range(3):
        harness.step()
    harness.submit("sibling", prompt=prompt, max_new_tokens=54, message={"group": "g"})
    harness.step()
    harness.submit("urgent", prompt_len=40, max_new_tokens=20, message={"priority": 9})
    return harness


def test_a_sibling_does_not_start_from_one_that_has_just_lost_its_place(make_scheduler):
    """The urgent request takes the leader's place, and the sibling is offered later in the very same pass."""
    harness = two_siblings_and_an_urgent_one(make_scheduler)

    harness.step()

    assert harness.last_pass.retracted == ["leader"]
    rids = [verdict.rid for verdict in harness.last_pass.verdicts]
    assert rids == ["urgent", "sibling"]
    harness.run_until_idle()  # the FakeRunner would find garbage


def test_whoever_lends_a_sibling_its_page_keeps_its_place_in_that_pass(make_scheduler):
    """The sibling is admitted first, from a copy of the leader's page; the next one is urgent enough for the leader."""
    harness = make_scheduler(
        schedule_policy="priority", priority_preemption_threshold=0, page_size=4, max_running_requests=2
    )
    prompt = [5 + idx % 7 for idx in range(27)]
    harness.submit("leader", prompt=prompt, max_new_tokens=20, message={"group": "g", "priority": 0})
    harness.step()
    harness.step()
    harness.submit("sibling", prompt=prompt, max_new_tokens=9, message={"group": "g", "priority": 9})
    harness.submit("urgent", prompt_len=8, max_new_tokens=5, message={"priority": 8})

    batch = harness.step()

    assert len(batch.plan.page_copies) == 8
    assert [req.rid for req in batch.reqs] == ["sibling", "leader"]
    assert harness.last_pass.retracted == []
    harness.run_until_idle()
