"""Models with state layers and a disk tier: pages and the state at their end travel together, or not at all.

The FakeRunner starts a request from a checkpoint only if it is the state after the request's own prefix.
"""

from __future__ import annotations

from typing import Any

import pytest

from engine.runtime.transport.kv_tiers import CancelLoad, Loaded, LoadPages, LookUp, StorePages
from engine.scheduler.records.decision_log import Handover
from engine.scheduler.tiers import page_tier

from .fake_disk import PAGE_BYTES, STATE_BYTES, DiskHarness, FakeDisk, ints

PROMPT = list(range(1, 42))  # ten whole pages and a token
CHUNK = 16
LENGTHS = sorted(
    {chunks * CHUNK + page + token for chunks in (1, 2, 3) for page in (-4, 0, 4) for token in (-1, 0, 1)}
)


@pytest.fixture(autouse=True)
def _short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_tier, "MIN_TOKENS", 8)


def hybrid(disk: FakeDisk | None = None, **settings: Any) -> DiskHarness:
    """An engine whose model has state layers; with a disk, a new one on the folder of an earlier one."""
    if disk is not None:
        disk.orders.clear()
    settings = {"num_checkpoints": 16, "checkpoint_pages": 100, "chunked_prefill_size": CHUNK, **settings}
    return DiskHarness(disk=disk, **settings)


def cached(harness: DiskHarness, prompt: list[int]) -> int:
    """Tokens of a prompt that are not computed."""
    rid = harness.submit(prompt=prompt)
    harness.run_until_idle()
    return harness.answers[rid].rows[-1].usage.cached_tokens


def orders(harness: DiskHarness, kind: type) -> list[Any]:
    return [order for order in harness.disk.orders if isinstance(order, kind)]


@pytest.fixture
def disk() -> FakeDisk:
    """The disk has `PROMPT` with the state after its tenth page."""
    first = hybrid()
    assert cached(first, PROMPT) == 0
    return first.disk


@pytest.mark.parametrize("checkpoint_pages", [1, 3, 100])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_of_any_length_is_found_up_to_its_last_border(length: int, checkpoint_pages: int) -> None:
    """Also if there are states at other borders, such as the end of a prompt of whole pages."""
    prompt = [1 + k % 90 for k in range(length)]
    first = hybrid(checkpoint_pages=checkpoint_pages)
    cached(first, prompt)

    assert cached(hybrid(first.disk), prompt) == (length - 1) // 4 * 4


def test_a_loaded_state_is_reused_by_the_next_request(disk: FakeDisk) -> None:
    harness = hybrid(disk)
    assert [cached(harness, [*PROMPT[:40], own]) for own in (50, 51)] == [40, 40]
    assert len(orders(harness, LoadPages)) == 1


def test_pages_without_a_later_state_are_not_loaded(disk: FakeDisk) -> None:
    """A second prompt is stored with ten more pages, and the state at its end is lost."""
    longer = [*PROMPT, *range(50, 90)]
    cached(hybrid(disk), longer)
    assert len(disk.states) == 2
    disk.states.popitem()

    harness = hybrid(disk)
    assert cached(harness, longer) == 40
    (load,) = orders(harness, LoadPages)
    assert len(ints(load.pages)) == 10


def test_where_prompts_part_a_state_is_stored() -> None:
    first = hybrid(num_pages=128)
    first.submit(prompt=[95], max_new_tokens=100)  # the engine is never idle
    for own in (60, 70):
        first.submit(prompt=[*PROMPT[:24], *range(own, own + 9)])
        for _ in range(15):
            first.step()

    (store,) = orders(first, StorePages)
    assert len(ints(store.pages)) == 6
    assert cached(hybrid(first.disk), [*PROMPT[:24], 80, 81, 82]) == 24


@pytest.mark.parametrize("most", [0, 4, 9])
def test_a_load_that_is_not_whole_is_computed_from_the_first_token(disk: FakeDisk, most: int) -> None:
    harness = hybrid(disk)
    harness.disk.answers_itself = False
    rid = harness.submit(prompt=PROMPT)
    harness.answer()
    harness.step()
    harness.answer(most=most, error="a record is damaged")
    slots = harness.scheduler._parts.memory.kv.state_slots
    assert (slots.num_free, slots.loading) == (16, set())
    harness.disk.answers_itself = True
    harness.run_until_idle()
    assert harness.answers[rid].rows[-1].usage.cached_tokens == 0
    assert harness.events(rid) == ["looked up", "loading", "not loaded"]


def test_a_slot_is_used_again_only_when_nothing_is_written_to_it(disk: FakeDisk) -> None:
    harness = hybrid(disk, num_checkpoints=1)
    harness.disk.answers_itself = False
    rid = harness.submit(prompt=PROMPT)
    harness.answer()
    harness.step()
    harness.abort(rid)
    assert isinstance(harness.disk.orders[-1], CancelLoad)
    harness.submit(prompt=[7, *PROMPT[:6]])  # its state is not kept: there is no slot
    harness.run_until_idle()
    assert harness.prefix_cache.num_checkpoints == 0
    harness.disk.scribble(harness.runner)

    harness.answer()

    assert cached(harness, [7, *PROMPT[:6]]) == 0
    assert harness.prefix_cache.num_checkpoints == 1


def test_a_state_that_is_stored_stays_until_the_answer() -> None:
    harness = hybrid(num_checkpoints=1)
    harness.disk.answers_itself = False
    harness.submit(prompt=PROMPT, max_new_tokens=1)
    harness.answer()
    harness.run_until_idle()
    (store,) = harness.disk.open
    assert isinstance(store, StorePages) and store.checkpoint
    harness.submit(prompt=[7, *PROMPT[:6]], max_new_tokens=1)
    harness.run_until_idle()
    assert harness.prefix_cache.checkpoints() == [store.checkpoint]

    harness.answer()  # `check_source`: it is still the state at the end of the pages

    harness.submit(prompt=[8, *PROMPT[:6]], max_new_tokens=1)
    harness.run_until_idle()
    assert harness.prefix_cache.num_checkpoints == 1


def test_stores_change_no_order_of_the_states_to_drop() -> None:
    """The state that is stored was used before another one, and is dropped before it."""
    harness = hybrid(num_checkpoints=2)
    harness.disk.answers_itself = False
    for prompt in (PROMPT, [7, *PROMPT[:6]]):
        harness.submit(prompt=prompt, max_new_tokens=1)
        while harness.disk.open:
            harness.answer()
        harness.step()
        harness.step()
    harness.disk.answers_itself = True
    harness.run_until_idle()
    assert len(orders(harness, StorePages)) == 1
    cached(harness, [8, *PROMPT[:6]])
    assert cached(harness, [7, *PROMPT[:6]]) == 4


def test_without_a_free_slot_a_prompt_is_computed(disk: FakeDisk) -> None:
    """Its slot is that of a state that is stored, and no request runs that could free one."""
    harness = hybrid(disk, num_checkpoints=1)
    harness.disk.answers_itself = False
    harness.submit(prompt=[9, *PROMPT], max_new_tokens=1)
    harness.answer()
    harness.run_until_idle()
    rid = harness.submit(prompt=PROMPT)
    harness.answer(index=[isinstance(each, LookUp) for each in harness.disk.open].index(True))
    harness.run_until_idle()
    assert harness.answers[rid].rows[-1].usage.cached_tokens == 0
    harness.answer()


def test_the_gate_counts_the_state_whole(disk: FakeDisk) -> None:
    """Three of twelve pages are missing, of 1,024 bytes each; and the state."""
    longer = [*PROMPT[:40], *range(50, 59)]
    cached(hybrid(disk), longer)
    harness = hybrid(disk)
    harness.disk.answers_itself = False
    harness.submit(prompt=PROMPT[:37], max_new_tokens=1)
    harness.answer(most=0)
    harness.run_until_idle()
    while harness.disk.open:
        harness.answer()
    harness.scheduler._parts.transfer._prefill_s_per_token = 0.9  # type: ignore[attr-defined]
    harness.disk.estimate_s = (12 * PAGE_BYTES + STATE_BYTES) / 1000

    rid = harness.submit(prompt=longer)
    harness.answer()

    (why,) = [
        each.detail for each in harness.scheduler.decisions if isinstance(each, Handover) and each.rid == rid
    ][1:]
    assert why == "loading it was estimated at 8.072 s, computing it at 10.800 s"


def test_a_disk_that_says_more_than_it_may_changes_nothing(disk: FakeDisk) -> None:
    harness = hybrid(disk)
    harness.disk.answers_itself = False
    rid = harness.submit(prompt=PROMPT)
    harness.tell(Loaded(1, 10))
    harness.disk.answers_itself = True
    harness.run_until_idle()
    harness.tell(Loaded(1, 10))
    assert harness.answers[rid].rows[-1].usage.cached_tokens == 40
