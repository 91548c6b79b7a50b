"""`--kv-write evicted`: what is stored, when, and that eviction never waits; and look-ups of retracted requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.runtime.transport.kv_tiers import LoadPages, LookUp, StorePages
from engine.scheduler.tiers import page_tier

from .fake_disk import DiskHarness, ints


@pytest.fixture(autouse=True)
def _short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_tier, "MIN_TOKENS", 8)


def prompt(number: int, num_tokens: int = 41) -> list[int]:
    return [(number * 7 + k * (number + 3)) % 96 + 1 for k in range(num_tokens)]


def stores(harness: DiskHarness) -> list[StorePages]:
    return [order for order in harness.disk.orders if isinstance(order, StorePages)]


def begin_of(order: StorePages) -> list[int]:
    return [int(token) for token in ints(order.token_ids)[:41]]


def evicting(**more: Any) -> DiskHarness:
    """An engine with room for five prompts of ten pages and a token, and their answers."""
    return DiskHarness(num_pages=60, cache={"kv_write": "evicted"}, **more)


def test_a_prompt_and_its_answer_are_stored_just_before_they_are_evicted_and_come_back() -> None:
    harness = evicting()
    rids = [harness.submit(prompt=prompt(number), max_new_tokens=7) for number in range(3)]
    harness.run_until_idle()
    assert stores(harness) == [], "there is room, and an idle engine writes nothing"

    for number in range(3, 10):
        harness.submit(prompt=prompt(number), max_new_tokens=7)
        harness.run_until_idle()

    first = stores(harness)[0]
    whole = [*prompt(0), *harness.answers[rids[0]].tokens]
    assert begin_of(first) == prompt(0)
    assert ints(first.token_ids).tolist() == whole[: len(first.token_ids) // 4], "with its answer"
    assert len(first.token_ids) // 4 == 44
    harness.disk.orders.clear()
    rid = harness.submit(prompt=prompt(0), max_new_tokens=7)
    harness.run_until_idle()
    assert harness.events(rid) == ["looked up", "loading", "loaded"]
    assert harness.answers[rid].rows[-1].usage.loaded_tokens == 40
    again = [order for order in stores(harness) if begin_of(order) == prompt(0)]
    assert all(len(order.token_ids) // 4 == 44 for order in again), "what was loaded is not, alone"


def test_a_disk_that_does_not_answer_delays_no_eviction() -> None:
    harness = evicting(max_running_requests=1)
    harness.disk.answers_itself = False
    for number in range(12):
        rid = harness.submit(prompt=prompt(number), max_new_tokens=7)
        while any(isinstance(each, LookUp) for each in harness.disk.open):
            index = next(k for k, each in enumerate(harness.disk.open) if isinstance(each, LookUp))
            harness.answer(index=index)
        for _ in range(40):
            harness.step()
        assert harness.answers[rid].finish is not None
    assert len(stores(harness)) == 1, "one waits for its answer, and its pages alone stay"
    harness.disk.answers_itself = True
    harness.run_until_idle()


def test_a_failing_disk_is_given_each_prefix_once() -> None:
    harness = evicting(max_running_requests=1)
    harness.disk.answers_itself = False
    for number in range(8):
        harness.submit(prompt=prompt(number), max_new_tokens=7)
        for _ in range(60):
            if harness.disk.open:
                is_store = isinstance(harness.disk.open[0], StorePages)
                harness.answer(most=0 if is_store else None, error="full" if is_store else "")
            harness.step()
    firsts = [begin_of(order)[0] for order in stores(harness)]
    assert firsts and len(firsts) == len(set(firsts))
    figures = harness.scheduler.report(0.0).tiers["disk"]
    assert figures.store_errors == len(firsts)


def test_salted_prompts_and_those_that_stay_in_memory_are_not_stored() -> None:
    harness = evicting()
    for number in range(10):
        more: dict[str, Any] = {"extra_key": "salt"} if number % 2 else {"message": {"in_memory": True}}
        harness.submit(prompt=prompt(number), max_new_tokens=7, **more)
        harness.run_until_idle()
    assert stores(harness) == []
    harness.scheduler.close()
    harness.collect()
    assert stores(harness) == []


def test_an_engine_that_stops_stores_what_the_tree_has() -> None:
    harness = evicting()
    for number in range(3):
        harness.submit(prompt=prompt(number), max_new_tokens=7)
    harness.run_until_idle()
    assert stores(harness) == []
    orders = harness.scheduler.close()
    assert [begin_of(order)[:40] for order in orders if isinstance(order, StorePages)] == [
        prompt(number, 40) for number in (2, 1, 0)
    ]


def test_a_flush_lets_all_be_stored_again() -> None:
    harness = evicting()
    for _ in range(2):
        for number in range(8):
            harness.submit(prompt=prompt(number), max_new_tokens=7)
            harness.run_until_idle()
        assert prompt(0) in [begin_of(order) for order in stores(harness)]
        harness.flush()
        harness.disk.orders.clear()


@pytest.mark.parametrize("flushes", [False, True])
def test_what_was_computed_before_a_flush_is_not_stored_after_it(flushes: bool) -> None:
    harness = evicting()
    harness.submit(prompt=prompt(0), max_new_tokens=7)
    harness.run_until_idle()
    if flushes:
        harness.flush(device=False)
    assert any(isinstance(order, StorePages) for order in harness.scheduler.close()) != flushes


@pytest.mark.parametrize("kv_write", ["through", "evicted"])
def test_a_retracted_request_gets_back_from_the_disk_what_was_evicted(kv_write: str) -> None:
    """Its pages leave the pool while it waits; it asks when it could go on, once for each retraction."""
    harness = DiskHarness(
        num_pages=40, cache={"kv_write": kv_write}, admission_estimator="none", max_running_requests=3
    )
    rids = [harness.submit(prompt=prompt(number, 33), max_new_tokens=80) for number in range(3)]
    harness.run_until_idle()

    retracted = [rid for rid in rids if harness.answers[rid].rows[-1].usage.num_retractions]
    assert retracted, "nothing was retracted: the test does not test what it should"
    came_back = [rid for rid in retracted if harness.events(rid)[2:].count("loaded")]
    assert came_back, [harness.events(rid) for rid in retracted]
    for rid in retracted:
        usage = harness.answers[rid].rows[-1].usage
        assert (usage.cached_tokens, usage.loaded_tokens) == (0, 0), (
            "at its first admission nothing was cached"
        )
        assert harness.events(rid).count("looked up") <= 1 + usage.num_retractions
    loads = [order for order in harness.disk.orders if isinstance(order, LoadPages)]
    assert any(len(order.token_ids) // 4 > 33 for order in loads) or kv_write == "through", "answers, too"
    assert np.all([len(ints(order.pages)) for order in loads])
