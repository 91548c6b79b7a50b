"""Tests of the limit on adapters, and of requests that wait for a grammar."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.runtime.messages import FinishKind, GrammarReady
from engine.scheduler.records.verdict import AddReqResult, Reason
from engine.scheduler.requests.req import MAX_OVERTAKEN
from tests.scheduler.harness import Harness
from tests.selection import examples


def test_an_adapter_too_many_waits_and_blocks_nobody(make_scheduler):
    harness = make_scheduler(max_loras_per_batch=2)
    for idx, lora in enumerate(["a", "b", "c", "a", ""]):
        harness.submit(f"r{idx}", max_new_tokens=3, message={"lora_id": lora})

    batch = harness.step()

    assert [req.rid for req in batch.reqs] == ["r4", "r0", "r3", "r1"], "not ordered by adapter"
    refused = harness.last_pass.verdicts[2]
    assert (refused.rid, refused.result, refused.reason) == ("r2", AddReqResult.SKIP, Reason.LORA_LIMIT)
    assert (refused.need, refused.have) == (3, 2)
    harness.run_until_idle()
    assert harness.answers["r2"].finish.kind is FinishKind.LENGTH


def test_an_adapter_slot_is_taken_from_the_background_at_once(make_scheduler):
    """The adapter of the fewest lines gives its slot, among those that only lines use."""
    harness = make_scheduler(max_loras_per_batch=3)
    for rid in ("a0", "a1", "b0", "c1"):
        harness.submit(rid, max_new_tokens=40, message={"lora_id": rid[0], "background": True})
    for _ in range(8):
        harness.step()
    harness.submit("c0", max_new_tokens=40, message={"lora_id": "c"})
    harness.step()
    harness.submit("late", max_new_tokens=2, message={"lora_id": "d"})

    retracted = []
    for _ in range(2):
        harness.step()
        retracted += harness.last_pass.retracted

    assert retracted == ["b0"]
    assert harness.scheduler._parts.requests.by_id["late"].row >= 0
    harness.run_until_idle()


def test_a_new_request_takes_no_slot_while_one_is_free_or_its_adapter_has_one(make_scheduler):
    harness = make_scheduler(max_loras_per_batch=2)
    harness.submit("line", max_new_tokens=20, message={"lora_id": "a", "background": True})
    harness.step()
    for lora in ("a", "b"):
        harness.submit(lora, max_new_tokens=2, message={"lora_id": lora})
        harness.step()
        assert not harness.last_pass.retracted
    harness.run_until_idle()


@settings(max_examples=examples(40), deadline=None)
@given(
    loras=st.lists(st.sampled_from(["", "a", "b", "c", "d"]), min_size=1, max_size=12),
    most=st.integers(1, 3),
    chaos=st.sampled_from([None, "retract=0.3:6"]),
)
def test_never_more_adapters_than_may_run(loras, most, chaos):
    harness = Harness(max_loras_per_batch=most, num_pages=32, chaos=chaos)
    for lora in loras:
        harness.submit(prompt_len=6, max_new_tokens=6, message={"lora_id": lora})
    for _ in range(1000):
        batch = harness.step()
        if batch is None:
            break
        assert len({req.lora_id for req in batch.reqs if req.lora_id}) <= most
    harness.run_until_idle()


def test_adapters_do_not_share_prefixes(make_scheduler):
    harness = make_scheduler(page_size=4)
    prompt = list(range(1, 33))
    harness.submit("base", prompt=prompt)
    harness.run_until_idle()
    harness.submit("adapted", prompt=prompt, message={"lora_id": "a"})
    harness.submit("again", prompt=prompt)
    harness.run_until_idle()

    cached = {rid: answer.rows[0].usage.cached_tokens for rid, answer in harness.answers.items()}
    assert cached == {"base": 0, "adapted": 0, "again": 28}


def test_a_request_waits_aside_until_its_grammar_is_there(make_scheduler):
    harness = make_scheduler(max_running_requests=1)
    harness.submit("needs", message={"needs_grammar": True})
    harness.submit("other", max_new_tokens=2)

    batch = harness.step()

    assert [req.rid for req in batch.reqs] == ["other"]
    assert harness.last_pass.num_grammar == 1
    assert harness.scheduler.report(0.0).num_grammar_reqs == 1
    harness.submit("later", max_new_tokens=1)
    harness.scheduler.handle(GrammarReady("needs"), harness.now_s)
    while not harness.answers["needs"].rows:
        harness.step()
    assert not harness.answers["later"].rows  # it has kept its place by arrival
    harness.run_until_idle()


def test_waiting_for_a_grammar_alone_is_no_stall(make_scheduler):
    harness = make_scheduler()
    harness.submit("needs", message={"needs_grammar": True})
    for _ in range(20):
        assert harness.step() is None
        harness.scheduler.on_idle()

    assert harness.scheduler.report(0.0).stalled == ""
    harness.scheduler.handle(GrammarReady("needs"), harness.now_s)
    harness.run_until_idle()


def test_a_grammar_that_will_never_be_ends_its_request_alone(make_scheduler):
    harness = make_scheduler()
    harness.submit("bad", message={"needs_grammar": True})
    harness.submit("good")

    harness.scheduler.handle(GrammarReady("bad", "the schema has no root"), harness.now_s)
    harness.scheduler.handle(GrammarReady("unknown"), harness.now_s)
    harness.collect()

    finish = harness.answers["bad"].finish
    assert (finish.kind, finish.status, finish.message) == (FinishKind.ERROR, 400, "the schema has no root")
    harness.run_until_idle()


@pytest.mark.parametrize("num_lookahead_tokens", [0, 1, 5, 9])
def test_lookahead_slots_are_there_before_they_are_needed(make_scheduler, num_lookahead_tokens):
    """Before each step, a decoding row has slots for its next token and for as many draft tokens as it may use."""
    harness = make_scheduler(page_size=4, num_pages=128, num_lookahead_tokens=num_lookahead_tokens)
    for length in (3, 8, 17):
        harness.submit(prompt_len=length, max_new_tokens=20)
    parts = harness.scheduler._parts
    while harness.scheduler.num_unfinished:
        batch = harness.step()
        if batch is None:
            continue
        decodes = batch.rows[batch.num_extends :]
        here = batch.still_here(parts.memory.pool)[batch.num_extends :]
        for row, end in zip(decodes[here], batch.end[batch.num_extends :][here], strict=True):
            wanted = min(int(end) + num_lookahead_tokens, int(parts.memory.states.max_kv_len[row]))
            assert parts.memory.pool.num_pages[row] * 4 >= wanted
    harness.run_until_idle()


def test_a_stream_of_one_adapter_does_not_keep_another_out_for_ever(make_scheduler):
    """An "a" comes in every step; "c" is overtaken 32 times, then "a" is drained for it."""
    harness = make_scheduler(max_loras_per_batch=1, num_pages=256, max_running_requests=8)
    for idx in range(3):
        harness.submit(f"first{idx}", max_new_tokens=3, message={"lora_id": "a"})
    harness.step()
    harness.submit("c", max_new_tokens=1, message={"lora_id": "c"})

    steps = 0
    while not harness.answers["c"].rows:
        harness.submit(f"a{steps}", prompt_len=4, max_new_tokens=3, message={"lora_id": "a"})
        harness.step()
        steps += 1
        assert steps < 60

    assert steps > MAX_OVERTAKEN
    harness.run_until_idle()


def test_an_abort_of_the_one_that_is_drained_for_ends_the_drain(make_scheduler):
    harness = make_scheduler(max_loras_per_batch=1, num_pages=256, max_running_requests=8)
    harness.submit("first", max_new_tokens=80, message={"lora_id": "a"})
    harness.step()
    harness.submit("c", max_new_tokens=1, message={"lora_id": "c"})
    for idx in range(MAX_OVERTAKEN + 3):
        harness.submit(f"a{idx}", prompt_len=4, max_new_tokens=2, message={"lora_id": "a"})
        harness.step()
    harness.submit("late", prompt_len=4, max_new_tokens=2, message={"lora_id": "a"})
    for _ in range(3):
        harness.step()
    assert not harness.answers["late"].rows  # "a" is being drained

    harness.abort("c")
    harness.step()

    assert harness.answers["late"].rows
    harness.run_until_idle()


def test_many_of_one_adapter_do_not_hide_those_behind(make_scheduler):
    harness = make_scheduler(max_loras_per_batch=1, num_pages=256)
    harness.submit("uses", max_new_tokens=30, message={"lora_id": "a"})
    harness.step()
    for _ in range(200):
        harness.submit(prompt_len=4, max_new_tokens=1, message={"lora_id": "b"})
    harness.submit("base", prompt_len=4, max_new_tokens=1)

    harness.step()

    assert harness.answers["base"].rows
    harness.run_until_idle()
