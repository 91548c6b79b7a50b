"""Tests of `scheduler/prefix_cache/eviction.py`: what each policy is for, with numbers."""

import tracemalloc
from typing import get_args

import pytest

from engine.runtime.config.engine_config import EvictionPolicyName
from engine.scheduler.prefix_cache.base import PrefixMatch
from engine.scheduler.prefix_cache.eviction import EVICTION_RANKS, EvictionClass, EvictionQueue
from tests.scheduler.prefix_cache.cached_pool import CachedPool, ids, pages

POLICIES = get_args(EvictionPolicyName)
SYSTEM = [1, 2, 3, 4]


def scan(pool, first_token, num_prompts, length=4, times=1, priority=0):
    """Prompts that nobody asks for again, each asked for `times` times."""
    for number in range(num_prompts):
        for _ in range(times):
            pool.serve([first_token + number] * length, priority=priority)


# (token, priority) of each request, in order
HISTORY = [(1, 5), (2, 0), (1, 0), (3, 1), (2, 0), (4, 0), (2, 0)]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", [1, 3, 4, 2]),
        ("lfu", [3, 4, 1, 2]),  # used once, once, twice, three times
        ("fifo", [1, 2, 3, 4]),
        ("slru", [3, 4, 1, 2]),  # 3 and 4 are on probation
        ("priority", [4, 2, 3, 1]),  # priorities 0, 0, 1, 5
    ],
)
def test_the_order_of_each_policy(policy, order):
    pool = CachedPool(4, policy)
    for token, priority in HISTORY:
        pool.serve([token], priority=priority)
    page = {token: pool.cache.match("", ids(token), 1).node.pages.item() for token in order}

    assert [pool.cache.evict(1).item() for _ in order] == [page[token] for token in order]


@pytest.mark.parametrize(
    ("policy", "pages_kept"), [("lru", 0), ("fifo", 0), ("lfu", 4), ("slru", 4), ("priority", 0)]
)
def test_a_scan_passes_a_hot_prompt(policy, pages_kept):
    """A system prompt is used ten times; then twenty prompts come that are seen once and fill the pool five times."""
    pool = CachedPool(16, policy)
    for _ in range(10):
        pool.serve(SYSTEM)
    scan(pool, 100, num_prompts=20)

    assert pool.serve(SYSTEM) == pages_kept


@pytest.mark.parametrize("policy", get_args(EvictionPolicyName))
def test_prompts_that_come_once_go_before_older_ones(policy):
    pool = CachedPool(16, policy)
    pool.serve(SYSTEM)
    for number in range(20):
        pool.serve([100 + number] * 4, once=True)

    assert pool.cached(SYSTEM) == 4
    assert pool.cache.verify([]) == []


def test_a_prefix_of_prompts_that_come_once_is_kept_and_only_their_ends_go():
    pool = CachedPool(16)
    pool.serve([7] * 4)
    for number in range(20):
        assert pool.serve([*SYSTEM, *[100 + number] * 4], once=True) == (4 if number else 0)

    assert (pool.cached(SYSTEM), pool.cached([7] * 4)) == (4, 4)
    assert pool.cache.verify([]) == []


@pytest.mark.parametrize(("policy", "pages_kept"), [("lru", 0), ("slru", 0), ("lfu", 4)])
def test_frequency_tells_hot_from_seen_twice(policy, pages_kept):
    """Every prompt of the scan comes twice, which is enough for slru's protected segment, but not to be frequent."""
    pool = CachedPool(16, policy)
    for _ in range(10):
        pool.serve(SYSTEM)
    scan(pool, 100, num_prompts=20, times=2)

    assert pool.serve(SYSTEM) == pages_kept


@pytest.mark.parametrize(("policy", "pages_kept"), [("lfu", 0), ("slru", 4), ("lru", 4)])
def test_frequency_does_not_forget_what_was_hot_once(policy, pages_kept):
    """The price of lfu: yesterday's prompts, used ten times each, hold 12 of 16 pages; today's push out each other."""
    pool = CachedPool(16, policy)
    for yesterday in (10, 20, 30):
        for _ in range(10):
            pool.serve([yesterday] * 4)
    for today in (50, 50, 60, 60):
        pool.serve([today] * 4)

    assert pool.serve([50] * 4) == pages_kept


def test_first_in_goes_first_however_much_it_is_used():
    pool = CachedPool(12, "fifo")
    pool.serve(SYSTEM)
    pool.serve([10] * 4)
    for _ in range(10):
        assert pool.serve(SYSTEM) == 4
    pool.serve([20] * 4)

    pool.serve([30] * 2)

    assert pool.cached(SYSTEM) == 2  # the oldest pays although it was the hottest
    assert pool.cached([10] * 4) == 4


@pytest.mark.parametrize(("policy", "pages_kept"), [("lru", 0), ("priority", 4)])
def test_what_urgent_requests_use_survives_background_work(policy, pages_kept):
    pool = CachedPool(16, policy)
    pool.serve(SYSTEM, priority=5)
    scan(pool, 100, num_prompts=20)

    assert pool.serve(SYSTEM, priority=5) == pages_kept


def test_one_urgent_user_lifts_a_prefix_and_only_that():
    pool = CachedPool(8, "priority")
    pool.serve([1, 2, 3, 4], priority=0)
    pool.serve([1, 2], priority=5)
    scan(pool, 100, num_prompts=4)

    assert pool.cached([1, 2, 3, 4]) == 2


def test_a_negative_priority_goes_before_the_default():
    pool = CachedPool(8, "priority")
    pool.serve([1, 1], priority=-3)
    pool.serve([2, 2], priority=0)
    pool.serve([3, 3], priority=-1)

    pool.cache.evict(4)

    assert [pool.cached([token] * 2) for token in (1, 2, 3)] == [0, 2, 0]


def test_slru_evicts_the_protected_when_nothing_else_is_left():
    pool = CachedPool(8, "slru")
    pool.serve([1, 1])
    pool.serve([1, 1])
    pool.serve([2, 2])

    assert len(pool.cache.evict(3)) == 3
    assert (pool.cached([1, 1]), pool.cached([2, 2])) == (1, 0)
    assert len(pool.cache.evict(3)) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_leaf_loses_its_end_only(policy):
    pool = CachedPool(8, policy)
    pool.serve([1, 2, 3, 4, 5, 6])

    pool.cache.evict(1)
    pool.cache.evict(2)

    assert pool.cached([1, 2, 3, 4, 5, 6]) == 3


def test_a_use_costs_the_queue_nothing():
    """Lazy re-keying: a leaf that is used a thousand times has one entry, not a thousand."""
    pool = CachedPool(8)
    for _ in range(1000):
        pool.serve([1, 2])
        pool.serve([3, 4])

    queue = pool.cache._queue
    assert isinstance(queue, EvictionQueue)
    assert len(queue._heaps[EvictionClass.ORDINARY].entries) == 2


def test_forgotten_leaves_do_not_pile_up_in_the_queue():
    pool = CachedPool(4)
    cache = pool.cache
    for number in range(1000):
        pool.serve([number])
        cache.forget(cache.lock("", cache.match("", ids(number), 1)))
        pool.free = [4, 3, 2, 1]

    assert cache.all_pages().size == 0
    assert len(cache._queue._heaps[EvictionClass.ORDINARY].entries) <= 64


@pytest.mark.parametrize("policy", POLICIES)
def test_eviction_costs_what_it_takes(policy):
    """A leaf comes up twice at most per page of it that goes: ranks are asked for O(pages), whatever the history."""

    class Counting:
        def __init__(self):
            self.inner, self.num_ranks = EVICTION_RANKS[policy], 0

        def __call__(self, node):
            self.num_ranks += 1
            return self.inner(node)

    counting = Counting()
    pool = CachedPool(1000, policy)
    pool.cache = type(pool.cache)(1, eviction=counting)
    for _ in range(5):
        for number in range(100):
            lease = pool.cache.lock("", pool.cache.match("", ids(number, 1), 2))
            if not lease.num_pages:
                pool.cache.extend(lease, ids(number, 1), pages(2 * number, 2 * number + 1))
            pool.cache.release(lease)
    counting.num_ranks = 0

    for _ in range(200):
        assert len(pool.cache.evict(1)) == 1

    assert counting.num_ranks <= 3 * 200
    assert pool.cache.lock("", PrefixMatch()).num_pages == 0


@pytest.mark.parametrize("num_pages", [1 << 12, 1 << 15])
def test_taking_a_page_from_a_long_leaf_does_not_copy_the_leaf(num_pages):
    """Bytes allocated by 300 evictions of a page each: O(pages of the leaf) once, then O(1) each."""
    pool = CachedPool(num_pages)
    pool.serve(list(range(num_pages)))
    num_copied_bytes = 0
    tracemalloc.start()
    for _ in range(300):
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        assert len(pool.cache.evict(1)) == 1
        num_copied_bytes += tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()

    page_bytes = 4 + 4  # its number and its token
    assert num_copied_bytes < 4 * num_pages * page_bytes + 300 * 2 * 256 * page_bytes
    assert pool.cached(list(range(num_pages))) == num_pages - 300
    assert pool.cache.verify([]) == []


def test_a_long_leaf_goes_from_its_end_whatever_is_asked_for():
    pool = CachedPool(5000, max_pinned_pages=5000)
    prompt = list(range(5000))
    pool.serve(prompt)
    pool.cache.pin("", ids(*prompt[:700]), 1e9)
    left = 5000

    for count in (1, 700, 1, 2000, 256, 257, 1):
        taken = sorted(pool.cache.evict(count).tolist())
        left -= count
        assert taken == list(range(left + 1, left + count + 1))
        assert pool.cached(prompt) == left
        assert pool.cache.pinned_pages == 700
        assert pool.cache.verify([]) == []
