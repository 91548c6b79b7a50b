"""LoRA adapters in the scheduler: slots, loads, unloads, and that no page is ever shared between two adapters."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from engine.runtime.adapter_spec import AdapterSpec
from engine.runtime.config.engine_config import CacheConfig, SchedulerConfig
from engine.runtime.messages import AdapterDone, AdapterRead, Call, FinishKind, LoadAdapter, UnloadAdapter
from engine.scheduler.batch import ScheduleBatch
from engine.scheduler.memory.pages import LedgerError
from engine.scheduler.records.verdict import Reason
from engine.scheduler.scheduler import Scheduler

from ..fake_runner import pairs

PROMPT = list(range(1, 21))


def spec(fingerprint: str) -> AdapterSpec:
    return AdapterSpec(f"name of {fingerprint}", "", fingerprint, 8, 0)


def loads_of(steps: list[ScheduleBatch]) -> list[tuple[int, int]]:
    return [pair for step in steps for pair in pairs(step.plan.adapter_loads)]


def test_an_adapter_moves_into_a_slot_once_and_stays_there(make_scheduler):
    harness = make_scheduler(max_loras_per_batch=2)
    for _ in range(3):
        harness.submit(message={"lora_id": "a"}, max_new_tokens=2)
    first = harness.run_until_idle()
    harness.submit(message={"lora_id": "a"}, max_new_tokens=2)
    second = harness.run_until_idle()

    assert loads_of(first) == [(1, 1)] and loads_of(second) == []
    slots = {new.rid: new.adapter_slot for step in first + second for new in step.plan.new_reqs}
    assert set(slots.values()) == {1}


def test_the_slot_that_was_idle_longest_is_taken(make_scheduler):
    harness = make_scheduler(max_loras_per_batch=2)
    loads = []
    for fingerprint in "abacb":
        harness.submit(message={"lora_id": fingerprint}, max_new_tokens=1)
        loads += loads_of(harness.run_until_idle())

    store = harness.store_ids
    assert loads == [(1, store["a"]), (2, store["b"]), (2, store["c"]), (1, store["b"])]


def test_equal_prompts_of_two_adapters_share_no_page_and_a_reload_shares_none_with_the_old_weights(
    make_scheduler,
):
    harness = make_scheduler(page_size=4)
    for fingerprint in ("", "a", "b", "a", "a of other weights", ""):
        harness.submit(prompt=PROMPT, message={"lora_id": fingerprint}, max_new_tokens=2)
        harness.run_until_idle()

    cached = [answer.rows[-1].usage.cached_tokens for answer in harness.answers.values()]
    assert cached == [0, 0, 0, 16, 0, 16]


def test_requests_of_a_step_stand_side_by_side_by_adapter(make_scheduler):
    harness = make_scheduler()
    for n, fingerprint in enumerate(["b", "", "a", "b", "a", ""]):
        harness.submit(f"r{n}", message={"lora_id": fingerprint}, max_new_tokens=6)
    harness.step()
    batch = harness.step()

    slots = [req.adapter_slot for req in batch.reqs]
    assert slots == sorted(slots) and len(set(slots)) == 3
    harness.run_until_idle()


def test_a_request_waits_until_its_adapter_is_read(make_scheduler):
    harness = make_scheduler()
    store_id = harness.load_adapter("a", read=False)
    rid = harness.submit(message={"lora_id": "a"})

    assert harness.step() is None
    assert harness.last_pass.verdicts[0].reason is Reason.ADAPTER_LOADING
    for _ in range(100):  # it is no stall
        harness.scheduler.on_idle()
        harness.step()
    assert harness.scheduler.report(0.0).stalled == ""
    harness.scheduler.handle(AdapterRead(store_id), harness.now_s)
    harness.run_until_idle()

    assert harness.answers[rid].finish.kind is FinishKind.LENGTH
    assert harness.adapter_answers == {store_id: AdapterDone()}


def test_an_adapter_that_cannot_be_read_fails_its_requests_alone(make_scheduler):
    harness = make_scheduler()
    store_id = harness.load_adapter("a", read=False)
    bad, good = harness.submit(message={"lora_id": "a"}), harness.submit()

    harness.scheduler.handle(AdapterRead(store_id, "a/adapter_model.safetensors: has NaN"), harness.now_s)
    harness.run_until_idle()

    finish = harness.answers[bad].finish
    assert (finish.kind, finish.status) == (FinishKind.ERROR, 400) and "has NaN" in finish.message
    assert harness.answers[good].finish.kind is FinishKind.LENGTH
    assert "has NaN" in harness.adapter_answers[store_id].error
    later = harness.submit(message={"lora_id": "a"})
    assert "has NaN" in harness.answers[later].finish.message
    harness.unload_adapter("a")
    harness.store_ids["a"] = 7  # so that the harness does not load it
    assert "not loaded any more" in harness.answers[harness.submit(message={"lora_id": "a"})].finish.message


def test_an_unknown_adapter_and_a_server_without_slots_refuse(make_scheduler):
    harness = make_scheduler()
    harness.load_adapter("a")
    harness.store_ids["b"] = 99  # so that the harness does not load it
    rid = harness.submit(message={"lora_id": "b"})
    assert "not loaded any more" in harness.answers[rid].finish.message

    without = Scheduler(
        SchedulerConfig(chunked_prefill_size=64),
        CacheConfig(),
        replace(harness.capacity, num_adapter_slots=0),
        frozenset(),
    )
    without.handle(Call(5, LoadAdapter(1, spec("a"))), 0.0)
    (done,) = without.take_call_answers()
    assert isinstance(done.answer, AdapterDone)
    assert done.call_id == 5 and "--enable-lora" in done.answer.error


def test_unloading_ends_the_requests_and_frees_the_slot(make_scheduler):
    harness = make_scheduler(max_loras_per_batch=1)
    running = harness.submit(message={"lora_id": "a"}, max_new_tokens=50)
    harness.step()
    waiting = harness.submit(message={"lora_id": "a"}, max_new_tokens=50)

    harness.unload_adapter("a")
    assert {harness.answers[rid].finish.kind for rid in (running, waiting)} == {FinishKind.ERROR}
    after = harness.submit(message={"lora_id": "b"}, max_new_tokens=2)
    steps = harness.run_until_idle()

    assert harness.answers[after].finish.kind is FinishKind.LENGTH
    assert loads_of(steps) == [(1, harness.store_ids["b"])]


def test_calls_are_answered_once_each(make_scheduler):
    harness = make_scheduler()
    harness.load_adapter("a", read=False)
    harness.scheduler.handle(
        Call(50, LoadAdapter(1, spec("a"))), 0.0
    )  # the same again, while it is being read
    harness.scheduler.handle(Call(0, LoadAdapter(1, spec("a"))), 0.0)  # asks for no answer
    harness.scheduler.handle(AdapterRead(1), 0.0)
    harness.scheduler.handle(AdapterRead(1), 0.0)
    harness.scheduler.handle(Call(51, LoadAdapter(1, spec("a"))), 0.0)
    harness.scheduler.handle(Call(52, UnloadAdapter(1)), 0.0)
    harness.scheduler.handle(Call(53, UnloadAdapter(7)), 0.0)
    harness.collect()

    assert harness.adapter_answers == {call: AdapterDone() for call in (1, 50, 51, 52, 53)}


def test_the_audit_sees_a_wrong_slot(make_scheduler):
    harness = make_scheduler()
    harness.submit("r", message={"lora_id": "a"}, max_new_tokens=9)
    harness.step()
    req = harness.scheduler._requests.by_id["r"]
    req.adapter_slot = 3

    with pytest.raises(LedgerError, match="slot 3 instead of 1"):
        harness.scheduler.audit()
    req.adapter_slot = 1
    harness.run_until_idle()
