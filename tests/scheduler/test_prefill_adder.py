"""Tests of `scheduler/prefill_adder.py` and `scheduler/budget.py`: verdicts, their reasons and their arithmetic."""

import pytest

from engine.runtime.config import SchedulerConfig
from engine.runtime.step_plan import ForwardMode
from engine.scheduler.budget import CLIP_MAX_NEW_TOKENS, PrefillBudget
from engine.scheduler.policy.base import MAX_OVERTAKEN
from engine.scheduler.verdict import AddReqResult, Reason

from .harness import extend_lens


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
    assert (verdict.extend_len, verdict.output_len, verdict.need) == (20, 20, 20 + 20 + 4)
    assert verdict.have == harness.last_pass.budget_before.rem_total_tokens == 64 - 24 - 19
    assert "NO_KV second" in verdict.text() and "need 44 have 21" in verdict.text()
    harness.run_until_idle()


@pytest.mark.parametrize(("prompt_len", "result"), [(12, AddReqResult.CONTINUE), (13, AddReqResult.NO_TOKEN)])
def test_memory_must_be_more_than_what_is_needed(make_scheduler, prompt_len, result):
    """Strictly: with nothing left over, the next decode that needs a page would retract somebody."""
    harness = make_scheduler(num_pages=16, page_size=4)
    harness.submit("first", prompt_len=20, max_new_tokens=20)
    harness.step()
    harness.submit("second", prompt_len=prompt_len, max_new_tokens=4)

    harness.step()

    (verdict,) = harness.last_pass.verdicts
    assert (verdict.result, verdict.need, verdict.have) == (result, prompt_len + 4 + 4, 21)
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

    assert (verdict.output_len, verdict.need) == (CLIP_MAX_NEW_TOKENS, 40 + CLIP_MAX_NEW_TOKENS + 4)
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
    admission = harness.scheduler.decisions.about("r0")
    assert [verdict.reason for _, verdict in admission] == [Reason.CHUNKED] + [Reason.CHUNK_CONTINUED] * 3
    assert [verdict.output_len for _, verdict in admission] == [5, 0, 0, 0]


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
    assert second.budget_after.rem_total_tokens == second.budget_before.rem_total_tokens  # promised already
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
    for _ in range(100):
        harness.submit(prompt_len=20, max_new_tokens=20)

    harness.step()

    record = harness.last_pass
    assert len(record.verdicts) == 1 + SchedulerConfig().look_ahead
    assert (record.num_rest, record.rest_reason) == (
        99 - SchedulerConfig().look_ahead,
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
