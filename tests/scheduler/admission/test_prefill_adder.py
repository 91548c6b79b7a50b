"""`prefill_adder.py` and `budget.py`: verdicts, their reasons and their arithmetic."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.runtime.config.engine_config import SchedulerConfig
from engine.runtime.feasibility import pages_for
from engine.runtime.step_plan import ForwardMode
from engine.scheduler.admission.budget import PrefillBudget
from engine.scheduler.estimator import CLIP_MAX_NEW_TOKENS, OutputEstimator, make_estimator
from engine.scheduler.records.verdict import AddReqResult, Reason
from engine.scheduler.requests.req import MAX_OVERTAKEN, Req, ReqStatus
from engine.scheduler.step_size.step_limits import PartialLimits, reserved_tokens
from tests.scheduler.admission.prefill_pass import (
    Candidate,
    CountedMemory,
    make_adder,
    make_budget,
    make_req,
    prefix_of,
    run_pass,
)
from tests.scheduler.harness import extend_lens
from tests.selection import examples


def budget(**changes):
    arguments = {
        "page_size": 4,
        "available_tokens": 400,
        "expected_tokens": 100.5,
        "max_prefill_tokens": 64,
        "chunk_size": 32,
        "num_decodes": 10,
    }
    return PrefillBudget(**(arguments | changes))


def test_budgets_start_from_memory_and_from_what_decodes_leave():
    assert budget().state() == (299, 400, 54, 22)


def test_an_admission_reserves_whole_pages_one_more_and_what_comes_later():
    it = budget()

    it.pin(8)
    it.reserve(extend_len=10, later_len=30)

    assert it.state() == (299 - 8 - 12 - 4 - 30, 400 - 8 - 12 - 4, 54 - 10, 22 - 10)


def test_decodes_leave_at_least_a_page_to_prompts():
    it = budget(num_decodes=1000)

    assert it.rem_step_tokens == 4


def test_a_request_that_lacks_memory_is_told_the_sums(make_scheduler):
    harness = make_scheduler(num_pages=16, page_size=4)
    harness.submit("first", prompt_len=20, max_new_tokens=20)
    harness.step()
    harness.submit("second", prompt_len=20, max_new_tokens=20)

    harness.step()

    (verdict,) = harness.last_pass.verdicts
    assert verdict.result is AddReqResult.NO_TOKEN and verdict.reason is Reason.NO_KV
    assert (verdict.extend_len, verdict.output_len, verdict.need) == (20, 20, 20 + 20 + 4 + 1)
    assert verdict.have == harness.last_pass.budget_before.rem_total_tokens == 64 - 24 - 19
    assert "NO_KV second" in verdict.text() and "need 45 have 21" in verdict.text()
    harness.run_until_idle()


@pytest.mark.parametrize(("prompt_len", "result"), [(12, AddReqResult.CONTINUE), (13, AddReqResult.NO_TOKEN)])
def test_memory_for_all_that_is_needed_and_one_slot_more(make_scheduler, prompt_len, result):
    """The slot more is SGLang's: with nothing left over, the next decode that needs a page would retract somebody."""
    harness = make_scheduler(num_pages=16, page_size=4)
    harness.submit("first", prompt_len=20, max_new_tokens=20)
    harness.step()
    harness.submit("second", prompt_len=prompt_len, max_new_tokens=4)

    harness.step()

    (verdict,) = harness.last_pass.verdicts
    assert (verdict.result, verdict.need, verdict.have) == (result, prompt_len + 4 + 4 + 1, 21)
    harness.run_until_idle()


def test_of_one_request_no_more_than_so_much_output_is_expected(make_scheduler):
    """Neither of one that asks to run, nor of one that runs, nor of one in the middle of its prompt."""
    harness = make_scheduler(
        num_pages=4096, page_size=4, max_model_len=10_000, chunked_prefill_size=16, max_prefill_tokens=16
    )
    harness.submit("runs", prompt_len=8, max_new_tokens=8000)
    harness.step()
    harness.submit("cut", prompt_len=40, max_new_tokens=8000)
    harness.step()
    (verdict,) = harness.last_pass.verdicts
    running = harness.last_pass.budget_before.rem_total_tokens
    harness.step()
    both = harness.last_pass.budget_before.rem_total_tokens

    assert (verdict.output_len, verdict.need) == (CLIP_MAX_NEW_TOKENS, 40 + CLIP_MAX_NEW_TOKENS + 4 + 1)
    assert running == (4096 - 3) * 4 - CLIP_MAX_NEW_TOKENS
    assert both == (4096 - 3 - 3) * 4 - 28 - 2 * CLIP_MAX_NEW_TOKENS


def test_alone_a_request_is_admitted_by_its_exact_worst_case(make_scheduler):
    harness = make_scheduler(num_pages=16, page_size=4, max_model_len=200)
    harness.submit(
        prompt_len=5, max_new_tokens=60
    )  # 64 slots: all there are; the estimate would want 5 + 60 + 4

    harness.step()

    (verdict,) = harness.last_pass.verdicts
    assert verdict.reason is Reason.ADMITTED_ALONE and (verdict.need, verdict.have) == (64, 64)
    harness.run_until_idle()


def test_a_prompt_is_cut_at_a_page_and_reserves_its_output_once(make_scheduler):
    harness = make_scheduler(chunked_prefill_size=10, page_size=4)
    harness.submit(prompt_len=30, max_new_tokens=5)

    steps = harness.run_until_idle()

    assert [extend_lens(step) for step in steps[:4]] == [[8], [8], [8], [6]]
    assert [step.plan.mode for step in steps[:5]] == [ForwardMode.EXTEND] * 4 + [ForwardMode.DECODE]
    admission = harness.verdicts_about("r0")
    assert [verdict.reason for verdict in admission] == [Reason.CHUNKED] + [Reason.CHUNK_CONTINUED] * 3
    assert [verdict.output_len for verdict in admission] == [5, 0, 0, 0]


def test_the_rest_of_a_cut_prompt_and_its_output_are_promised_in_each_pass(make_scheduler):
    harness = make_scheduler(chunked_prefill_size=16, page_size=4, num_pages=64)
    harness.submit("cut", prompt_len=40, max_new_tokens=11)

    harness.step()
    first = harness.last_pass
    harness.step()
    second = harness.last_pass

    assert first.budget_after.rem_total_tokens == 256 - (16 + 4) - 24 - 11
    assert first.budget_after.cur_rem_tokens == 256 - (16 + 4)
    # the first chunk's pages are gone; the last generated token needs no memory
    assert second.budget_before.rem_total_tokens == 240 - 24 - 10
    assert second.budget_before.cur_rem_tokens == 240
    assert second.budget_after.rem_total_tokens == second.budget_before.rem_total_tokens  # reserved already
    assert second.budget_after.cur_rem_tokens == 240 - (16 + 4)
    harness.run_until_idle()


def test_only_one_prompt_is_in_the_middle_of_its_chunks(make_scheduler):
    harness = make_scheduler(chunked_prefill_size=16, page_size=4)
    harness.submit(prompt_len=40)
    harness.submit(prompt_len=40)

    steps = harness.run_until_idle()

    # the second begins in the step in which the first ends; then a decode takes one token of each chunk
    assert [extend_lens(step) for step in steps[:6]] == [[16], [16], [8, 8], [12], [12], [8]]


def test_decodes_count_against_the_chunk_and_ride_along(make_scheduler):
    harness = make_scheduler(chunked_prefill_size=16, page_size=4)
    for _ in range(3):
        harness.submit(prompt_len=4, max_new_tokens=9)
    harness.step()
    harness.submit(prompt_len=30)

    batch = harness.step()

    assert batch.plan.mode is ForwardMode.MIXED
    assert (extend_lens(batch), len(batch) - batch.num_extends) == ([12], 3)  # 16 - 3 = 13, page aligned 12
    harness.run_until_idle()


def test_without_cutting_a_prompt_over_the_step_budget_gets_a_step_of_its_own(make_scheduler):
    harness = make_scheduler(chunked_prefill_size=-1, max_prefill_tokens=16, max_model_len=200)
    for length in (10, 100, 4, 5):
        harness.submit(prompt_len=length, max_new_tokens=1)

    steps = harness.run_until_idle()

    assert [extend_lens(step) for step in steps] == [[10], [100], [4, 5]]


def test_a_chunk_size_below_a_page_still_progresses(make_scheduler):
    harness = make_scheduler(chunked_prefill_size=3, page_size=16)
    harness.submit(prompt_len=40, max_new_tokens=1)

    assert [extend_lens(step) for step in harness.run_until_idle()] == [[16], [16], [8]]


def test_a_small_request_passes_a_big_one_that_lacks_memory(make_scheduler):
    harness = make_scheduler(num_pages=16, page_size=4)
    harness.submit("running", prompt_len=20, max_new_tokens=20)
    harness.step()
    harness.submit("big", prompt_len=20, max_new_tokens=20)
    harness.submit("small", prompt_len=2, max_new_tokens=2)

    harness.step()

    assert [verdict.result.name for verdict in harness.last_pass.verdicts] == ["NO_TOKEN", "CONTINUE"]
    harness.run_until_idle()


def test_the_look_ahead_is_bounded(make_scheduler):
    harness = make_scheduler(num_pages=16, page_size=4)
    harness.submit("running", prompt_len=20, max_new_tokens=20)
    harness.step()
    for _ in range(24):
        harness.submit(prompt_len=20, max_new_tokens=20)

    harness.step()

    record = harness.last_pass
    assert len(record.verdicts) == 1 + SchedulerConfig().look_ahead
    assert (record.num_rest, record.rest_reason) == (
        23 - SchedulerConfig().look_ahead,
        Reason.LOOK_AHEAD_SPENT,
    )
    assert record.rest_behind == "r1"
    harness.run_until_idle()


def test_ageing_ends_the_overtaking(make_scheduler):
    """Small ones keep coming; after `MAX_OVERTAKEN` passes they wait, and the big one runs."""
    harness = make_scheduler(num_pages=32, page_size=4, max_running_requests=4)
    harness.submit("small-0", prompt_len=4, max_new_tokens=8)
    harness.step()
    harness.submit("big", prompt_len=100, max_new_tokens=20)

    overtaken = 0
    for k in range(1, 1000):
        harness.submit(f"small-{k}", prompt_len=4, max_new_tokens=8)
        harness.step()
        if harness.answers["big"].rows:
            break
        admitted = [
            verdict for verdict in harness.last_pass.verdicts if verdict.result is AddReqResult.CONTINUE
        ]
        overtaken += bool(admitted) and admitted[0].rid != "big"
    assert overtaken == MAX_OVERTAKEN
    harness.run_until_idle()


@pytest.mark.parametrize("num_waiting", [100, 10_000])
def test_a_pass_looks_at_few_however_many_wait(make_scheduler, num_waiting):
    harness = make_scheduler(max_running_requests=2)
    for _ in range(num_waiting):
        harness.submit(prompt=[1, 2, 3], max_new_tokens=2)

    harness.step()
    record = harness.last_pass
    assert len(record.verdicts) == 2
    assert (record.num_rest, record.rest_reason) == (num_waiting - 2, Reason.NO_ROW)


def test_each_admission_pins_its_prefix_for_the_next_one_in_the_pass(make_scheduler):
    harness = make_scheduler(num_pages=64, page_size=4)
    prompts = [list(range(1, 18)), list(range(31, 48))]
    for prompt in prompts:
        harness.submit(prompt=prompt, max_new_tokens=1)
    harness.run_until_idle()
    assert harness.pages().cached == 8
    for prompt in prompts:
        harness.submit(prompt=prompt, max_new_tokens=10)

    harness.step()

    before, after = harness.last_pass.budget_before, harness.last_pass.budget_after
    each = 16 + 4 + 4 + 10  # pinned, computed in whole pages, a page for rounding, output
    assert before.rem_total_tokens - after.rem_total_tokens == 2 * each
    assert before.cur_rem_tokens - after.cur_rem_tokens == 2 * (each - 10)
    harness.run_until_idle()


# ------------------------------------------------------------ the limit on all tokens of a step


@pytest.mark.parametrize(
    ("limit", "num_decodes", "decodes_first", "prompt_tokens"),
    [
        (None, 10, True, 22),  # 32 by the chunk size
        (24, 10, False, 14),
        (24, 10, True, 14),
        (24, 23, False, 4),  # a page, so that the running cannot keep all others out
        (24, 23, True, 1),  # too little for a page: nothing is begun, a last token may be
        (24, 24, True, 0),
        (24, 99, True, 0),
        (24, 99, False, 4),
        (2, 0, True, 4),  # below a page, but nobody decodes: with nothing at all, nothing would ever run
    ],
)
def test_decodes_and_prompts_share_the_tokens_of_a_step(limit, num_decodes, decodes_first, prompt_tokens):
    it = budget(max_num_batched_tokens=limit, num_decodes=num_decodes, decodes_first=decodes_first)

    assert it.rem_step_tokens == prompt_tokens


def test_under_a_strict_limit_prompts_wait_for_the_running():
    adder = make_adder(make_budget(max_num_batched_tokens=24, num_decodes=24, decodes_first=True))
    assert adder.exhausted() is Reason.INPUT_BUDGET
    verdict = adder.continue_chunk(make_req("cut", 40), 8)
    assert (verdict.result, verdict.reason, adder.chunks) == (AddReqResult.OTHER, Reason.INPUT_BUDGET, [])

    adder = make_adder(make_budget(max_num_batched_tokens=24, num_decodes=22, decodes_first=True))
    assert adder.exhausted() is None
    req = make_req("new", 40)
    assert adder.add(req, prefix_of(adder, req)).result is AddReqResult.OTHER
    assert adder.chunks == []


@pytest.mark.parametrize(
    ("num_decodes", "decodes_first", "admitted"), [(0, True, 1), (3, True, 0), (3, False, 1)]
)
def test_a_prompt_that_is_never_cut_has_a_step_to_itself(num_decodes, decodes_first, admitted):
    adder = make_adder(
        make_budget(
            chunk_size=None, max_num_batched_tokens=16, num_decodes=num_decodes, decodes_first=decodes_first
        )
    )
    for rid in ("a", "b"):
        req = make_req(rid, 100)
        if adder.exhausted() is None:
            adder.add(req, prefix_of(adder, req))

    assert [chunk.length for chunk in adder.chunks] == [100] * admitted


# ------------------------------------------------------------ what is ready without computing


def test_ready_tokens_behind_the_cached_pages_take_memory_and_no_computing():
    kv = CountedMemory(4, {"r": 2})
    adder = make_adder(make_budget(chunk_size=16), kv)
    req = make_req("r", 30, 10)

    verdict = adder.add(req, prefix_of(adder, req, more_ready=13))

    assert (verdict.prefix_len, verdict.extend_len, verdict.need) == (21, 9, 22 + 10 + 4 + 1)
    (chunk,) = adder.chunks
    assert (chunk.start, chunk.length, chunk.is_last) == (21, 9, True)
    assert adder.budget.rem_step_tokens == 16 - 9
    assert adder.budget.cur_rem_tokens == 4000 - 8 - (
        24 + 4
    )  # locked; 22 tokens in whole pages, one for rounding
    assert adder.budget.rem_total_tokens == 4000 - 8 - (24 + 4) - 10
    assert kv.locked == {"r": 2}


def test_a_cut_behind_ready_tokens_ends_at_a_page_too():
    adder = make_adder(make_budget(chunk_size=8))
    req = make_req("r", 30, 10)

    adder.add(req, prefix_of(adder, req, more_ready=5))

    (chunk,) = adder.chunks
    assert (chunk.start, chunk.length, chunk.is_last) == (5, 7, False)


def test_a_request_whose_memory_comes_back_from_the_host_says_so():
    adder = make_adder(make_budget(), nothing_runs=True)
    req = make_req("r", 30, 10)
    for status in (ReqStatus.PREFILL, ReqStatus.SWAPPED):
        req.enter(status, 0.0)

    verdict = adder.add(req, prefix_of(adder, req, more_ready=29))

    assert (verdict.reason, verdict.extend_len) == (Reason.SWAPPED_IN, 1)


@pytest.mark.parametrize(("max_new_tokens", "kept"), [(1, 0), (4, 3), (9, 5), (900, 5)])
def test_slots_for_draft_tokens_are_kept_as_far_as_they_can_be_used(max_new_tokens, kept):
    none = make_estimator(SchedulerConfig(admission_estimator="none"), 4)
    adder = make_adder(make_budget(), estimator=none, num_lookahead_tokens=5)
    req = make_req("r", 8, max_new_tokens)

    assert adder.add(req, prefix_of(adder, req)).output_len == kept


def test_places_taken_from_others_count_at_once():
    adder = make_adder(make_budget(available_tokens=20, expected_tokens=16))
    req = make_req("urgent", 20, 10)
    assert adder.add(req, prefix_of(adder, req)).reason is Reason.NO_KV
    missing = adder.missing_tokens(req, prefix_of(adder, req))
    assert missing == 20 + 10 + 4 + 1 - 4

    adder.add_capacity(available_tokens=16, expected_tokens=missing - 16, num_rows=1)

    assert adder.add(req, prefix_of(adder, req)).reason is Reason.ADMITTED


# ------------------------------------------------------------ any pass


@st.composite
def passes(draw: st.DrawFn) -> dict[str, Any]:
    """Budgets, prompts in progress and waiting requests; what is in progress was admitted by the rules."""
    page_size = draw(st.sampled_from([1, 4, 16]))
    limits = draw(
        st.builds(PartialLimits, st.integers(1, 4), st.integers(1, 2), st.sampled_from([0, 20, 60]))
    )
    in_progress: list[tuple[Req, int]] = []
    for idx in range(draw(st.integers(0, limits.max_partial))):
        computed = draw(st.integers(1, 4)) * page_size
        in_progress.append((make_req(f"p{idx}", computed + draw(st.integers(1, 150)), 5), computed))
    waiting, cached = [], {}
    for idx in range(draw(st.integers(0, 8))):
        req = make_req(f"w{idx}", draw(st.integers(1, 200)), draw(st.integers(1, 60)))
        cached[req.rid] = draw(st.integers(0, min(3, (req.fill_len - 1) // page_size)))
        room = req.fill_len - 1 - cached[req.rid] * page_size
        waiting.append(Candidate(req, draw(st.sampled_from([0, 0, room // 2, room]))))
    return {
        "page_size": page_size,
        "num_pages": draw(st.integers(1, 400 // page_size)),
        "limits": limits,
        "in_progress": in_progress,
        "waiting": waiting,
        "cached": cached,
        "num_decodes": draw(st.sampled_from([0, 0, 1, 7, 40])),
        "chunk_size": draw(st.sampled_from([None, 3, 16, 50, 200])),
        "max_prefill_tokens": draw(st.sampled_from([5, 40, 300])),
        "max_num_batched_tokens": draw(st.sampled_from([None, 8, 30, 100])),
        "decodes_first": draw(st.booleans()),
        "estimator": draw(st.sampled_from(["ratio", "beta", "full", "none"])),
        "num_lookahead_tokens": draw(st.sampled_from([0, 5])),
    }


@settings(max_examples=examples(400), deadline=None)
@given(case=passes())
def test_no_pass_breaks_a_promise(case):
    page_size, limits = case["page_size"], case["limits"]
    in_progress, waiting = case["in_progress"], case["waiting"]
    if case["chunk_size"] is None:
        in_progress = []
    remaining = np.array([req.fill_len - computed for req, computed in in_progress], dtype=np.int32)
    reserved = reserved_tokens(remaining, page_size)
    available = max(case["num_pages"] * page_size, reserved)
    nothing_runs = not (in_progress or case["num_decodes"])
    estimator: OutputEstimator = make_estimator(
        SchedulerConfig(admission_estimator=case["estimator"]), page_size
    )
    it = PrefillBudget(
        page_size=page_size,
        available_tokens=available,
        expected_tokens=reserved,
        max_prefill_tokens=case["max_prefill_tokens"],
        chunk_size=case["chunk_size"],
        num_decodes=case["num_decodes"],
        max_num_batched_tokens=case["max_num_batched_tokens"],
        decodes_first=case["decodes_first"],
    )
    step_tokens = it.rem_step_tokens
    kv = CountedMemory(page_size, case["cached"])
    adder = make_adder(
        it,
        kv,
        limits=limits,
        num_prompts=len(in_progress) + len(waiting),
        nothing_runs=nothing_runs,
        estimator=estimator,
        num_lookahead_tokens=case["num_lookahead_tokens"],
    )

    verdicts = run_pass(adder, in_progress, waiting)  # checks that refusals change nothing

    chunks, by_rid = adder.chunks, {verdict.rid: verdict for verdict in verdicts}
    admitted = {verdict.rid for verdict in verdicts if verdict.result is AddReqResult.CONTINUE}
    assert admitted == {chunk.req.rid for chunk in chunks}
    # computing
    oversized = case["chunk_size"] is None and len(chunks) == 1
    assert sum(chunk.length for chunk in chunks) <= step_tokens or oversized
    for chunk in chunks:
        end = chunk.start + chunk.length
        assert chunk.length > 0 and by_rid[chunk.req.rid].extend_len == chunk.length
        assert chunk.is_last == (end == chunk.req.fill_len)
        assert chunk.is_last or end % page_size == 0
        assert chunk.is_last or case["chunk_size"] is not None
    # memory: of all in progress and admitted, the whole prompts fit, and with `full` the outputs do
    pages = reserved // page_size
    for chunk in chunks:
        if chunk.is_first:
            length = chunk.req.max_kv_len if case["estimator"] == "full" else chunk.req.fill_len
            pages += pages_for(length, page_size)  # cached ones are locked now, so they count as well
    assert pages * page_size <= available
    # partial prefills
    first_len = {chunk.req: chunk.req.fill_len - chunk.start for chunk in chunks if chunk.is_first}
    unfinished = len(in_progress) - sum(chunk.is_last and not chunk.is_first for chunk in chunks)
    unfinished += sum(chunk.is_first and not chunk.is_last for chunk in chunks)
    assert unfinished <= limits.max_partial
    num_long = sum(map(limits.is_long, remaining.tolist()))
    new_long = sum(map(limits.is_long, first_len.values())) if case["chunk_size"] is not None else 0
    assert new_long <= max(limits.max_long - num_long, 0)
    # no computing is left where it could be used
    if any(not chunk.is_last for chunk in chunks):
        assert min(it.rem_step_tokens, it.cur_rem_tokens) < page_size
    # whatever fits runs when nothing else does, under every rule and setting
    if nothing_runs and waiting and waiting[0].req.max_kv_len <= available // page_size * page_size:
        assert waiting[0].req.rid in admitted
