"""Tests of `scheduler/memory/ledger.py`: each kind of damage is found and named."""

import numpy as np
import pytest

from engine.scheduler.memory.pages import LedgerError


@pytest.fixture
def harness(make_scheduler):
    harness = make_scheduler(num_pages=32, page_size=4)
    harness.submit(prompt=list(range(1, 22)), max_new_tokens=8)
    harness.step()
    harness.submit(prompt=[*range(1, 17), 50, 51, 52], max_new_tokens=8)
    harness.step()
    harness.scheduler.audit()
    return harness


def test_a_leaked_page_is_named_with_all_terms(harness):
    harness.allocator.allocate(1)

    with pytest.raises(
        LedgerError,
        match=r"free \d+ \+ evictable \d+ \+ locked \d+ \+ held \d+ \+ incoming 0 = 31, but .* 32",
    ):
        harness.scheduler.audit()


def test_a_page_with_two_owners_is_found(harness):
    pool = harness.scheduler._parts.memory.pool
    row = next(iter(harness.scheduler._parts.requests.running.reqs)).row
    pool.pages[row, pool.num_pages[row] - 1] = harness.allocator.free_pages()[0]

    with pytest.raises(LedgerError, match="owners instead of one"):
        harness.scheduler.audit()


def test_a_lock_without_owner_is_found(harness):
    cache = harness.prefix_cache
    match = cache.match("", np.arange(1, 22, dtype=np.int32).tobytes(), 5)
    cache.lock("", match)

    with pytest.raises(LedgerError, match=r"locks and \d owners"):
        harness.scheduler.audit()


def test_idle_with_something_left_is_an_error(make_scheduler):
    harness = make_scheduler()
    harness.submit(prompt=list(range(1, 22)), max_new_tokens=2)
    harness.run_until_idle()
    cache = harness.prefix_cache
    cache.lock("", cache.match("", np.arange(1, 22, dtype=np.int32).tobytes(), 5))

    with pytest.raises(LedgerError, match="no request is left, but 0 pages are held, 5 are locked"):
        harness.scheduler.on_idle()
