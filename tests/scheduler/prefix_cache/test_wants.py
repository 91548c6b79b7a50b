"""Tests of `scheduler/prefix_cache/wants.py`, through `RadixCache` and through the scheduler."""

import random

import pytest

from engine.scheduler.prefix_cache import wants
from engine.scheduler.prefix_cache.radix_cache import RadixCache
from tests.scheduler.prefix_cache.cached_pool import CachedPool, ids, pages

FOREVER = 1e9


def want(pool, seq, tokens, num_missing=1):
    pool.cache.want(seq, pool.cache.match("", ids(*tokens), len(tokens)), num_missing)


def sound(pool):
    """Whether the cache agrees with itself; nothing is leased."""
    assert pool.cache.verify([]) == []
    return True


def test_the_prefix_of_a_waiting_request_outlives_what_was_used_later():
    pool = CachedPool(16, "lru")
    pool.serve([1, 2, 3, 4])
    want(pool, 1, [1, 2, 3, 4])
    for number in range(100, 150):
        pool.serve([number] * 4)

    assert pool.cached([1, 2, 3, 4]) == 4
    assert sound(pool)

    pool.cache.unwant(1)
    pool.serve([200] * 12)
    assert pool.cached([1, 2, 3, 4]) < 4
    assert sound(pool)


def test_wanted_pages_are_evictable_and_go_before_pinned_ones():
    pool = CachedPool(12, "lru", max_pinned_pages=4)
    pool.serve([1, 2, 3, 4])
    pool.serve([5, 6, 7, 8])
    pool.serve([9, 10, 11, 12])
    pool.cache.pin("", ids(1, 2, 3, 4), FOREVER)
    want(pool, 1, [1, 2, 3, 4], num_missing=9)
    want(pool, 2, [5, 6, 7, 8])
    assert pool.cache.evictable_pages == 12

    pool.cache.evict(4)
    assert [pool.cached(each) for each in ([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12])] == [4, 4, 0]
    pool.cache.evict(4)
    assert [pool.cached(each) for each in ([1, 2, 3, 4], [5, 6, 7, 8])] == [4, 0]
    assert sound(pool)
    pool.cache.evict(4)
    assert pool.cache.evictable_pages == 0
    assert sound(pool)


def test_the_request_with_the_most_to_compute_loses_its_prefix_first():
    pool = CachedPool(12, "lru")
    for first in (1, 5, 9):
        pool.serve([first, first + 1, first + 2, first + 3])
    want(pool, 1, [1, 2, 3, 4], num_missing=50)
    want(pool, 2, [5, 6, 7, 8], num_missing=500)
    want(pool, 3, [9, 10, 11, 12], num_missing=5)

    left = []
    for _ in range(3):
        pool.cache.evict(4)
        left.append([first for first in (1, 5, 9) if pool.cached([first, first + 1, first + 2, first + 3])])
    assert left == [[1, 9], [9], []]
    assert sound(pool)


def test_a_leaf_of_two_requests_counts_for_the_one_with_less_to_compute():
    pool = CachedPool(8, "lru")
    pool.serve([1, 2, 3, 4])
    pool.serve([5, 6, 7, 8])
    want(pool, 1, [1, 2, 3, 4], num_missing=900)
    want(pool, 2, [1, 2, 3, 4], num_missing=10)
    want(pool, 3, [5, 6, 7, 8], num_missing=100)

    pool.cache.evict(4)
    assert (pool.cached([1, 2, 3, 4]), pool.cached([5, 6, 7, 8])) == (4, 0)
    assert sound(pool)


def test_what_was_wanted_below_an_evicted_leaf_is_wanted_above_it():
    pool = CachedPool(12, "lru")
    pool.serve([1, 2, 3, 4, 5, 6])
    pool.serve([1, 2, 3, 9, 9, 9])  # splits after 3
    want(pool, 1, [1, 2, 3, 4, 5, 6])
    pool.cache.evict(3)
    assert (pool.cached([1, 2, 3, 4, 5, 6]), pool.cached([1, 2, 3, 9])) == (6, 3)
    pool.cache.evict(3)  # nothing else is left: the leaf 4, 5, 6 goes, and 1, 2, 3 are wanted now
    pool.serve([7, 8])
    pool.cache.evict(2)
    assert (pool.cached([1, 2, 3]), pool.cached([7, 8])) == (3, 0)
    assert sound(pool)
    pool.cache.evict(3)
    assert sound(pool)


def test_a_new_match_replaces_the_old_one():
    pool = CachedPool(12, "lru")
    pool.serve([1, 2, 3, 4])
    pool.serve([5, 6, 7, 8])
    want(pool, 1, [1, 2, 3, 4])
    want(pool, 1, [5, 6, 7, 8])
    pool.cache.evict(4)
    assert (pool.cached([1, 2, 3, 4]), pool.cached([5, 6, 7, 8])) == (0, 4)
    pool.serve([1, 2, 3, 4])
    want(pool, 1, [50, 60])  # nothing of it is cached
    pool.cache.evict(4)
    assert (pool.cached([1, 2, 3, 4]), pool.cached([5, 6, 7, 8])) == (4, 0)
    assert sound(pool)


def test_a_long_queue_counts_up_to_a_number(monkeypatch):
    monkeypatch.setattr(wants, "MAX_WANTS", 2)
    pool = CachedPool(12, "lru")
    for first in (1, 5, 9):
        pool.serve([first, first + 1, first + 2, first + 3])
    for seq, first in enumerate((9, 5, 1)):
        assert pool.cache.counts_wants == (seq < 2)
        want(pool, seq, [first, first + 1, first + 2, first + 3])

    pool.cache.evict(4)
    assert [pool.cached([first, first + 1]) for first in (1, 5, 9)] == [0, 2, 2]
    assert sound(pool)


@pytest.mark.parametrize("ends", ["started", "aborted"])
def test_a_request_wants_nothing_after_it_has_left_the_queue(make_scheduler, ends):
    harness = make_scheduler(num_pages=40, max_running_requests=1, page_size=1)
    harness.submit("a", prompt=list(range(10, 20)), max_new_tokens=2)
    harness.run_until_idle()
    harness.submit("first", prompt=list(range(30, 35)), max_new_tokens=3)
    harness.step()
    harness.submit("b", prompt=[*range(10, 20), 7], max_new_tokens=1)
    harness.step()
    by_seq = harness.scheduler._parts.memory.kv._cache._wants._by_seq
    assert len(by_seq) == 1
    if ends == "aborted":
        harness.abort("b")
        assert not by_seq
    harness.run_until_idle()
    assert not by_seq


@pytest.mark.parametrize("seed", range(20))
def test_eviction_finds_all_that_is_evictable_whatever_is_wanted_pinned_or_locked(seed):
    rng = random.Random(seed)
    cache = RadixCache(1, max_pinned_pages=8)
    leases, num_pages = [], 0
    for _ in range(150):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
        found = cache.match("", ids(*tokens), len(tokens))
        match rng.choice(
            ["serve", "serve", "leave", "want", "want", "unwant", "pin", "promise", "unpin", "evict"]
        ):
            case "serve":
                lease = cache.lock("", found)
                new = tokens[lease.num_pages :]
                cache.extend(lease, ids(*new), pages(*range(num_pages, num_pages + len(new))))
                leases.append(lease)
                num_pages += len(new)
            case "leave" if leases:
                lease = leases.pop(rng.randrange(len(leases)))
                if rng.random() < 0.5:
                    cache.release(lease, once=rng.random() < 0.5)
                else:
                    cache.forget(lease)
            case "want":
                cache.want(rng.randrange(6), found, rng.randrange(100))
            case "unwant":
                cache.unwant(rng.randrange(6))
            case "pin":
                cache.pin("", ids(*tokens), FOREVER)
            case "promise":
                cache.pin("", ids(*tokens), rng.random(), rng.choice(["a", "b", "c"]))
            case "unpin":
                cache.unpin("", ids(*tokens))
            case "evict":
                wanted = rng.randrange(1, 6)
                expected = min(wanted, cache.evictable_pages)
                assert len(cache.evict(wanted)) == expected
        assert cache.verify(leases) == []
    for lease in leases:
        cache.release(lease)
    assert len(cache.flush()) > 0 == cache.evictable_pages
    assert not cache._wants._by_seq
