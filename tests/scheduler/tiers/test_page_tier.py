"""What a scheduler does with a disk tier, call by call; `fake_disk.py` answers as each test says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.runtime.messages import Call, FinishKind, FlushCache
from engine.runtime.transport.kv_tiers import (
    CancelLoad,
    Forget,
    Forgotten,
    Found,
    Loaded,
    LoadPages,
    LookUp,
    Stored,
    StorePages,
)
from engine.scheduler.queries.why import explain
from engine.scheduler.tiers import page_tier

from .fake_disk import PAGE_BYTES, DiskHarness, FakeDisk, ints

PROMPT = list(range(1, 42))  # ten whole pages and a token


@pytest.fixture(autouse=True)
def _short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_tier, "MIN_TOKENS", 8)


def kinds(disk: FakeDisk) -> list[type]:
    return [type(order) for order in disk.orders]


def restarted(before: DiskHarness, **settings: Any) -> DiskHarness:
    """A new engine on the folder of another one."""
    before.disk.orders.clear()
    return DiskHarness(disk=before.disk, **settings)


@pytest.fixture
def warm() -> DiskHarness:
    """A new engine; the disk has the ten pages of `PROMPT`."""
    first = DiskHarness()
    first.submit(prompt=PROMPT)
    first.run_until_idle()
    assert kinds(first.disk) == [LookUp, StorePages]
    return restarted(first)


def test_a_prompt_is_stored_once_it_is_computed_and_found_after_a_restart(warm: DiskHarness) -> None:
    rid = warm.submit(prompt=PROMPT)
    warm.run_until_idle()

    assert kinds(warm.disk) == [LookUp, LoadPages], "what was loaded is not stored again"
    usage = warm.answers[rid].rows[-1].usage
    assert usage.cached_tokens == 40
    assert warm.events(rid) == ["looked up", "loading", "loaded"]
    figures = warm.scheduler.report(0.0).tiers["disk"]
    assert figures is not None
    assert (figures.lookups, figures.loaded_tokens, figures.loading_pages, figures.leased_pages) == (
        1,
        40,
        0,
        0,
    )
    assert (figures.loaded_bytes, figures.stored_bytes) == (10 * PAGE_BYTES, 0)


def test_with_three_stages_pages_are_loaded_when_no_step_can_write_to_them_any_more(
    warm: DiskHarness,
) -> None:
    """A page that comes free may be written to by all steps in flight, and two stay in flight after a pass."""
    staged = restarted(warm, num_stages=3, overlap=2, chunked_prefill_size=8)
    staged.disk.answers_itself = False
    staged.submit(prompt=list(range(50, 97)) * 2)
    staged.collect()
    staged.answer()
    for _ in range(3):
        staged.step()
    rid = staged.submit(prompt=PROMPT)
    staged.collect()
    staged.answer()

    staged.step()
    taken_after = staged.in_flight[-1][0].plan.step_id - 1

    assert staged.events(rid) == ["looked up", "loading"] and len(staged.in_flight) == 2
    assert kinds(staged.disk) == [LookUp, LookUp] and staged.in_flight[0][0].plan.step_id == taken_after
    staged.step()
    assert kinds(staged.disk) == [LookUp, LookUp, LoadPages]
    assert staged.in_flight[0][0].plan.step_id > taken_after
    staged.disk.answers_itself = True
    staged.run_until_idle()
    assert staged.answers[rid].rows[-1].usage.cached_tokens == 40


def test_a_prompt_that_the_prefix_cache_has_asks_no_disk(warm: DiskHarness) -> None:
    for _ in range(2):
        warm.submit(prompt=PROMPT)
        warm.run_until_idle()

    assert kinds(warm.disk).count(LookUp) == 1


def test_short_prompts_prompt_logprobs_and_salts_ask_no_disk_and_are_not_stored(warm: DiskHarness) -> None:
    warm.submit(prompt=PROMPT[:8])
    warm.submit(prompt=PROMPT, extra_key="secret")
    warm.submit(prompt=PROMPT, prompt_logprobs=0)
    warm.run_until_idle()

    assert [order for order in kinds(warm.disk) if order is not StorePages] == []
    assert all(not order.namespace for order in warm.disk.orders if isinstance(order, StorePages))


def test_a_prompt_that_stays_in_memory_is_loaded_and_not_stored(warm: DiskHarness) -> None:
    rid = warm.submit(prompt=PROMPT, message={"in_memory": True})
    for _ in range(2):  # what a second request uses is stored at once
        warm.submit(prompt=[*range(70, 96), *PROMPT], message={"in_memory": True})
        warm.run_until_idle()
    warm.scheduler.close()
    warm.collect()

    assert warm.events(rid) == ["looked up", "loading", "loaded"]
    own = np.arange(70, 96, dtype=np.int32).tobytes()
    stores = [order for order in warm.disk.orders if isinstance(order, StorePages)]
    assert not any(order.token_ids.startswith(own) for order in stores)


def test_a_busy_engine_stores_what_a_second_request_uses_alone() -> None:
    harness = DiskHarness(num_pages=128)
    harness.submit(prompt=[95], max_new_tokens=200)  # it runs all the time
    harness.submit(prompt=PROMPT)
    for _ in range(20):
        harness.step()
    assert StorePages not in kinds(harness.disk)
    harness.submit(prompt=[*PROMPT[:24], *range(60, 80)])
    for _ in range(20):
        harness.step()
    (store,) = [order for order in harness.disk.orders if isinstance(order, StorePages)]
    assert (len(ints(store.pages)), len(store.token_ids)) == (6, 24 * 4)
    harness.run_until_idle()
    lengths = [len(ints(order.pages)) for order in harness.disk.orders if isinstance(order, StorePages)]
    assert lengths == [6, 11, 10], "and the rest when nothing runs, the newest first"


def test_through_stores_each_prompt_at_its_end() -> None:
    harness = DiskHarness(cache={"kv_write": "through"})
    harness.submit(prompt=[95], max_new_tokens=200)
    harness.submit(prompt=PROMPT)
    for _ in range(20):
        harness.step()
    assert kinds(harness.disk).count(StorePages) == 1


def test_an_engine_that_stops_stores_the_rest() -> None:
    harness = DiskHarness()
    harness.submit(prompt=[95], max_new_tokens=200)
    for number in range(3):
        harness.submit(prompt=[number + 1, *PROMPT])
    for _ in range(30):
        harness.step()
    assert StorePages not in kinds(harness.disk)
    orders = harness.scheduler.close()
    assert [type(order) for order in orders] == [StorePages] * 3


def test_a_load_that_takes_longer_than_computing_is_left(warm: DiskHarness) -> None:
    warm.submit(prompt=[70] * 30)  # now the time of computing is known: 0.01 s
    warm.run_until_idle()
    warm.disk.estimate_s = 0.5
    rid = warm.submit(prompt=PROMPT)
    warm.run_until_idle()
    assert LoadPages not in kinds(warm.disk)
    assert warm.events(rid) == ["looked up", "not loaded"]


def test_a_flush_forgets_the_disk_and_loads_nothing_that_was_asked_for(warm: DiskHarness) -> None:
    warm.disk.answers_itself = False
    rid = warm.submit(prompt=PROMPT)
    warm.answer()
    warm.step()
    warm.flush()
    assert kinds(warm.disk) == [LookUp, LoadPages, Forget, CancelLoad]
    assert not warm.disk.pages
    assert warm.status(rid) == "waiting"
    warm.disk.answers_itself = True
    warm.run_until_idle()
    assert warm.answers[rid].rows[-1].usage.cached_tokens == 0


@pytest.mark.parametrize("error", ["", "the store does not answer"])
def test_a_flush_is_answered_when_the_disk_has_forgotten(warm: DiskHarness, error: str) -> None:
    warm.disk.forgets_itself = warm.disk.answers_itself = False
    warm.scheduler.handle(Call(7, FlushCache()), warm.now_s)
    warm.collect()
    assert not warm.flushes

    warm.answer(error=error)

    assert [done.error for done in warm.flushes] == [error]
    warm.scheduler.handle(Forgotten(7), warm.now_s)
    warm.collect()
    assert len(warm.flushes) == 1, "a call has one answer"
    assert warm.flush(tier=False).error == "", "the KV pool alone is flushed at once"


def test_a_flush_may_leave_out_the_disk_or_the_device(warm: DiskHarness) -> None:
    warm.submit(prompt=PROMPT)
    warm.run_until_idle()
    assert warm.flush(tier=False).flushed_tokens >= 40
    assert Forget not in kinds(warm.disk) and warm.disk.pages

    rid = warm.submit(prompt=PROMPT)
    warm.run_until_idle()
    assert warm.answers[rid].rows[-1].usage.loaded_tokens == 40
    assert warm.flush(device=False).flushed_tokens == 0
    assert Forget in kinds(warm.disk) and not warm.disk.pages

    rid = warm.submit(prompt=PROMPT)
    warm.run_until_idle()
    usage = warm.answers[rid].rows[-1].usage
    assert (usage.cached_tokens, usage.loaded_tokens) == (40, 0), "the KV pool still has it"
    totals = warm.scheduler.report(warm.now_s).totals
    assert (totals.cached_tokens, totals.prompt_tier_tokens) == (120, 80), "two of three were loaded"


def started(warm: DiskHarness, **cache: Any) -> DiskHarness:
    """An engine on the disk of `warm` with other settings, that has measured the time of computing a prompt."""
    harness = restarted(warm, cache=cache)
    harness.submit(prompt=[70] * 30)
    harness.run_until_idle()
    harness.disk.orders.clear()
    return harness


def test_wait_loads_what_is_slower_than_computing_and_for_as_long_as_it_takes(warm: DiskHarness) -> None:
    harness = started(warm, kv_fetch="wait")
    harness.disk.answers_itself, harness.disk.estimate_s = False, 20.0
    rid = harness.submit(prompt=PROMPT)
    harness.answer()
    harness.step()
    harness.now_s += page_tier.WAIT_LIMIT_S - 1.0
    harness.step()
    assert harness.status(rid) == "receiving"
    harness.answer()
    harness.run_until_idle()
    assert harness.answers[rid].rows[-1].usage.loaded_tokens == 40

    other = restarted(harness, cache={"kv_fetch": "wait"})
    rid = other.submit(prompt=PROMPT)
    other.answer()
    other.step()
    other.now_s += page_tier.WAIT_LIMIT_S
    other.step()
    assert other.events(rid) == ["looked up", "loading", "not loaded"], "a disk that never answers"


def test_a_timeout_counts_from_the_answer_to_the_look_up(warm: DiskHarness) -> None:
    harness = restarted(warm, cache={"kv_fetch": "timeout:250"})
    harness.disk.answers_itself = False
    rid = harness.submit(prompt=PROMPT)
    assert harness.scheduler.wake_s() == pytest.approx(harness.now_s + 0.25)
    harness.answer()
    found_s = harness.now_s
    for _ in range(2):
        harness.step()
        assert harness.scheduler.wake_s() == pytest.approx(found_s + 0.25)
    harness.now_s = found_s + 0.25
    harness.step()
    assert harness.events(rid) == ["looked up", "loading", "not loaded"]


def test_best_effort_uses_what_is_loaded_when_the_request_could_start(warm: DiskHarness) -> None:
    harness = restarted(warm, cache={"kv_fetch": "best_effort"}, max_running_requests=1)
    running = harness.submit(prompt=[95], max_new_tokens=6)
    harness.step()
    harness.disk.answers_itself = False
    rid = harness.submit(prompt=PROMPT)
    harness.answer()
    harness.step()
    assert kinds(harness.disk) == [LookUp, LoadPages], "all rows are taken"
    while harness.answers[running].finish is None:
        harness.step()
    harness.step()
    assert kinds(harness.disk) == [LookUp, LoadPages, CancelLoad]
    harness.step()
    assert kinds(harness.disk).count(CancelLoad) == 1
    harness.answer(most=3)
    harness.disk.answers_itself = True
    harness.run_until_idle()
    assert harness.answers[rid].rows[-1].usage.loaded_tokens == 12


def test_prompts_with_a_salt_may_be_stored_and_loaded(warm: DiskHarness) -> None:
    harness = restarted(warm, cache={"kv_persist_salted": True})
    harness.submit(prompt=PROMPT, extra_key="secret")
    harness.run_until_idle()
    assert kinds(harness.disk) == [LookUp, StorePages]
    harness = restarted(harness, cache={"kv_persist_salted": True})
    rid = harness.submit(prompt=PROMPT, extra_key="secret")
    harness.run_until_idle()
    assert harness.answers[rid].rows[-1].usage.loaded_tokens == 40


def test_why_names_the_disk(warm: DiskHarness) -> None:
    warm.submit(prompt=[70] * 30)
    warm.run_until_idle()
    rid = warm.submit(prompt=PROMPT)
    warm.run_until_idle()
    explanation = explain(warm.scheduler.decisions, rid)
    assert "loaded 40 of 41 prompt tokens from disk in 0.0" in explanation.sentence
    assert "MB); computing them was estimated at 0.0" in explanation.sentence
    assert [row[2] for row in explanation.rows][1:4] == ["looked up", "loading", "loaded"]


def test_why_reports_and_steps_name_the_store(warm: DiskHarness) -> None:
    store = restarted(warm, cache={"kv_disk": None, "kv_store": "redis://localhost"})
    rid = store.submit(prompt=PROMPT)
    store.run_until_idle()
    explanation = explain(store.scheduler.decisions, rid)
    assert "loaded 40 of 41 prompt tokens from store in 0.0" in explanation.sentence
    assert store.scheduler.report(0.0).tiers.keys() == {"store"}


def test_a_look_up_that_fails_is_counted_and_the_prompt_computed(warm: DiskHarness) -> None:
    warm.disk.answers_itself = False
    rid = warm.submit(prompt=PROMPT)
    warm.step()
    job = warm.disk.open.pop().job
    warm.tell(Found(job, 0, error="the store has failed: refused"))
    warm.disk.answers_itself = True
    warm.run_until_idle()
    assert warm.answers[rid].rows[-1].usage.cached_tokens == 0
    assert warm.events(rid) == ["looked up", "not loaded"]
    figures = warm.scheduler.report(0.0).tiers["disk"]
    assert (figures.lookup_errors, figures.load_errors, figures.timeouts) == (1, 0, 0)


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru"])
def test_copies_count_as_no_use(policy: Any) -> None:
    """The order of eviction is that of an engine without a disk."""
    orders = []
    for kv_disk in (None, "folder"):
        harness = DiskHarness(num_pages=40, cache={"eviction_policy": policy, "kv_disk": kv_disk})
        for prompt in (PROMPT, PROMPT, [5, *PROMPT], [6, *PROMPT]):
            harness.submit(prompt=prompt, max_new_tokens=1)
            harness.run_until_idle()
        cache = harness.prefix_cache
        orders.append([int(page) for _ in range(cache.evictable_pages) for page in cache.evict(1)])
    assert orders[0] == orders[1]


def test_a_part_that_the_prefix_cache_has_is_not_loaded() -> None:
    first = DiskHarness()
    first.submit(prompt=PROMPT)
    first.run_until_idle()
    second = restarted(first)
    second.disk.answers_itself = False
    second.submit(prompt=PROMPT[:13], max_new_tokens=1)
    second.answer(most=0)
    second.run_until_idle()
    second.disk.answers_itself = True
    second.disk.orders.clear()

    second.submit(prompt=PROMPT)
    second.run_until_idle()

    (load,) = [order for order in second.disk.orders if isinstance(order, LoadPages)]
    assert load.first_page == 3 and len(ints(load.pages)) == 7
    assert len(load.token_ids) == 40 * 4


@pytest.mark.parametrize("loading", [False, True])
def test_an_aborted_request_leaves_at_once_and_its_pages_stay_until_nothing_is_written(
    warm: DiskHarness, loading: bool
) -> None:
    warm.disk.answers_itself = False
    rid = warm.submit(prompt=PROMPT)
    if loading:
        warm.answer()
        warm.step()
    warm.abort(rid)

    finish = warm.answers[rid].finish
    assert finish is not None and finish.kind is FinishKind.ABORT
    figures = warm.scheduler.report(0.0).tiers["disk"]
    assert figures.loading_pages == (10 if loading else 0)
    warm.scheduler.on_idle()
    assert (CancelLoad in kinds(warm.disk)) == loading
    warm.answer()
    figures = warm.scheduler.report(0.0).tiers["disk"]
    assert figures.loading_pages == 0
    warm.scheduler.on_idle()
    assert warm.scheduler._parts.transfer.num_open == 0


def test_a_look_up_without_an_answer_delays_a_request_for_two_seconds(warm: DiskHarness) -> None:
    warm.disk.answers_itself = False
    rid = warm.submit(prompt=PROMPT)
    warm.step()
    assert warm.status(rid) == "receiving"
    assert warm.scheduler.wake_s() == pytest.approx(102.0)
    warm.now_s = 102.0
    warm.step()
    assert warm.events(rid) == ["looked up", "not loaded"]
    other = warm.submit(prompt=[9, *PROMPT])
    assert warm.status(other) == "waiting", "a disk that does not answer is asked again only after it has"
    warm.run_until_idle()
    warm.answer()
    warm.submit(prompt=[8, *PROMPT])
    assert kinds(warm.disk).count(LookUp) == 2


def test_a_load_may_take_twice_its_estimate(warm: DiskHarness) -> None:
    warm.disk.answers_itself = False
    warm.disk.estimate_s = 3.0
    rid = warm.submit(prompt=PROMPT)
    warm.answer()
    warm.step()
    begun_s = warm.now_s
    assert warm.scheduler.wake_s() == pytest.approx(begun_s + 6.0)
    warm.now_s = begun_s + 5.9
    warm.step()
    assert warm.status(rid) == "receiving"
    warm.now_s = begun_s + 6.0
    warm.run_until_idle()
    assert warm.answers[rid].rows[-1].usage.cached_tokens == 0
    warm.disk.scribble(warm.runner)
    assert warm.scheduler.report(0.0).tiers["disk"].loading_pages == 10
    warm.answer(index=[isinstance(each, LoadPages) for each in warm.disk.open].index(True))
    assert warm.scheduler.report(0.0).tiers["disk"].loading_pages == 0


@pytest.mark.parametrize(
    "news", [Found(1, 10), Loaded(1, 10), Loaded(77, 1), Found(77, 1), Stored(77, 1), Stored(1, 1)]
)
@pytest.mark.parametrize("after", ["look-up", "found", "loading", "loaded"])
def test_news_of_other_jobs_or_that_come_twice_change_nothing(
    warm: DiskHarness, news: Any, after: str
) -> None:
    warm.disk.answers_itself = False
    rid = warm.submit(prompt=PROMPT)
    for name in ("look-up", "found", "loading", "loaded"):
        if name == "found":
            warm.answer()
        elif name == "loading":
            warm.step()
        elif name == "loaded":
            warm.answer()
        if name == after:
            break
    wanted = (type(news), after) in {(Found, "look-up"), (Loaded, "loading")} and news.job == 1
    if not wanted:
        warm.tell(news)
    warm.disk.answers_itself = True
    warm.run_until_idle()
    assert warm.answers[rid].rows[-1].usage.cached_tokens == 40


def test_a_disk_that_has_lost_pages_gives_fewer(warm: DiskHarness) -> None:
    warm.disk.answers_itself = False
    rid = warm.submit(prompt=PROMPT)
    warm.answer()
    warm.step()
    warm.answer(most=4, error="a record is damaged")
    warm.disk.answers_itself = True
    warm.run_until_idle()

    assert warm.answers[rid].rows[-1].usage.cached_tokens == 16
    assert warm.scheduler.report(0.0).tiers["disk"].load_errors == 1


def test_requests_with_the_same_prefix_load_it_once(warm: DiskHarness) -> None:
    warm.disk.answers_itself = False
    rids = [warm.submit(prompt=[*PROMPT[:40], *own]) for own in ([50], [51, 52], [53])]
    for _ in rids:
        warm.answer()
    warm.step()
    assert [type(each) for each in warm.disk.open] == [LoadPages]
    warm.disk.answers_itself = True
    warm.answer()
    warm.run_until_idle()

    assert kinds(warm.disk).count(LoadPages) == 1
    assert [warm.answers[rid].rows[-1].usage.cached_tokens for rid in rids] == [40, 40, 40]


def test_at_most_four_prompts_and_an_eighth_of_the_pool_are_loaded_at_once() -> None:
    first = DiskHarness(num_pages=400, max_model_len=600)
    lengths = [30, 30, 30, 30, 30, 90, 250]
    prompts = [[n + 2, *(1 + token % 96 for token in range(length))] for n, length in enumerate(lengths)]
    for prompt in prompts:
        first.submit(prompt=prompt)
        first.run_until_idle()
    second = restarted(first, num_pages=400, max_model_len=600)
    second.disk.answers_itself = False
    for prompt in prompts:
        second.submit(prompt=prompt)
    for _ in prompts:
        second.answer()
    second.step()
    assert [len(ints(each.pages)) for each in second.disk.open if isinstance(each, LoadPages)] == [7, 7, 7, 7]
    loads = []
    while any(isinstance(each, LoadPages) for each in second.disk.open):
        loads.append([len(ints(each.pages)) for each in second.disk.open if isinstance(each, LoadPages)])
        second.answer(index=[isinstance(each, LoadPages) for each in second.disk.open].index(True))
        while second.scheduler._parts.requests.waiting:
            second.step()
        second.step()
    assert [62] in loads, "a prompt above an eighth of the pool is loaded alone"
    assert all(len(each) <= 4 and (sum(each) <= 50 or len(each) == 1) for each in loads)
    second.disk.answers_itself = True
    second.run_until_idle()


def test_pages_that_are_stored_stay_locked_until_the_answer() -> None:
    harness = DiskHarness(num_pages=64)
    harness.disk.answers_itself = False
    for number in range(3):
        harness.submit(prompt=[number + 1, *PROMPT], max_new_tokens=1)
        harness.answer(index=-1)  # the look-up
    harness.run_until_idle()

    assert kinds(harness.disk).count(StorePages) == 1, "the second one would lock more than 1/16 of the pool"
    assert harness.scheduler.report(0.0).tiers["disk"].leased_pages == 10
    assert harness.flush().kept_tokens == 40
    harness.answer()
    assert harness.scheduler.report(0.0).tiers["disk"].leased_pages == 0
    assert harness.flush().kept_tokens == 0


def test_a_request_that_alone_needs_the_pages_being_stored_waits_for_them() -> None:
    harness = DiskHarness(num_pages=12, max_model_len=48)
    harness.disk.answers_itself = False
    harness.submit(prompt=PROMPT[:33], max_new_tokens=1)
    harness.answer()
    harness.run_until_idle()
    rid = harness.submit(prompt=[77, *PROMPT[:32]], max_new_tokens=12)
    harness.answer(index=-1)
    for _ in range(20):
        if harness.step() is None and not harness.in_flight:
            harness.scheduler.on_idle()
    assert harness.answers[rid].finish is None
    harness.disk.answers_itself = True
    harness.answer()
    harness.run_until_idle()
