"""`BlockResidency`: the times of one page in a hundred, from its entry into the prefix cache to its eviction."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from engine.runtime.scheduler_report import RESIDENCY_BUCKETS_S, HistogramCounts
from engine.scheduler.arrays import IntArray
from engine.scheduler.prefix_cache.base import Lease
from engine.scheduler.prefix_cache.radix_cache import RadixCache
from engine.scheduler.prefix_cache.residency import SAMPLE_EVERY
from tests.scheduler.harness import Harness

ALL = 1 << 20


def ids(*tokens: int) -> bytes:
    return np.array(tokens, dtype=np.int32).tobytes()


def pages_from(first: int, count: int) -> IntArray:
    return np.arange(first, first + count, dtype=np.int32)


def put(cache: RadixCache, tokens: bytes, pages: IntArray) -> Lease:
    """Enter pages of one token each as a new request does."""
    lease = cache.lock("", cache.match("", tokens, ALL))
    cache.extend(lease, tokens[4 * lease.num_pages :], pages[lease.num_pages :])
    return lease


def values(found: HistogramCounts) -> list[float]:
    """The upper bounds of the buckets with values."""
    bounds = (*RESIDENCY_BUCKETS_S, float("inf"))
    return [bound for bound, count in zip(bounds, found.counts, strict=True) for _ in range(count)]


@pytest.fixture
def cache() -> RadixCache:
    return RadixCache(page_size=1)


@pytest.fixture
def at(cache: RadixCache) -> Callable[[float], None]:
    """Sets the time."""
    return cache.expire_pins


def test_a_page_lives_from_its_entry_to_its_eviction(cache: RadixCache, at: Callable[[float], None]):
    tokens = ids(*range(1, 251))
    at(10.0)
    lease = put(cache, tokens, pages_from(1, 250))  # 100 and 200 are in the sample
    at(11.0)
    cache.release(lease)
    at(13.5)
    cache.release(cache.lock("", cache.match("", tokens, 150)))  # uses page 100
    at(16.0)
    cache.evict(100)  # from the end of the leaf: page 200
    figures = cache.residency()
    assert (values(figures["lifetime"]), figures["lifetime"].sum_s) == ([10.0], 6.0)
    assert (values(figures["idle_before_evict"]), figures["idle_before_evict"].sum_s) == ([10.0], 6.0)
    assert (values(figures["reuse_gap"]), figures["reuse_gap"].sum_s) == ([5.0], 3.5)

    at(40.0)
    cache.evict(150)
    figures = cache.residency()
    assert (sorted(values(figures["lifetime"])), figures["lifetime"].sum_s) == ([10.0, 30.0], 36.0)
    assert figures["idle_before_evict"].sum_s == 6.0 + 26.5
    assert figures["reuse_gap"].sum_s == 3.5


def test_a_page_that_comes_back_begins_again_and_a_flush_is_no_eviction(
    cache: RadixCache, at: Callable[[float], None]
):
    at(1.0)
    cache.release(put(cache, ids(*range(100)), pages_from(1, 100)))
    assert len(cache.flush()) == 100
    at(5.0)
    cache.release(put(cache, ids(*range(100)), pages_from(1, 100)))
    at(7.0)
    cache.evict(100)
    figures = cache.residency()
    assert figures["lifetime"].sum_s == 2.0
    assert sum(figures["lifetime"].counts) == 1 == sum(figures["idle_before_evict"].counts)


def test_what_is_only_copied_is_no_use(cache: RadixCache, at: Callable[[float], None]):
    at(1.0)
    tokens = ids(*range(100))
    cache.release(put(cache, tokens, pages_from(1, 100)))
    at(2.0)
    cache.release(cache.lock("", cache.match("", tokens, ALL), is_use=False))
    assert not sum(cache.residency()["reuse_gap"].counts)


def test_pages_outside_of_the_sample_leave_no_trace(cache: RadixCache, at: Callable[[float], None]):
    at(1.0)
    tokens = ids(*range(SAMPLE_EVERY - 1))
    cache.release(put(cache, tokens, pages_from(1, SAMPLE_EVERY - 1)))
    assert cache._residency.is_empty
    cache.release(cache.lock("", cache.match("", tokens, ALL)))
    cache.evict(SAMPLE_EVERY - 1)
    assert not any(sum(each.counts) for each in cache.residency().values())


def test_a_scheduler_reports_it_with_the_sources_of_its_prompts():
    harness = Harness(num_pages=210, page_size=4, max_model_len=240)
    shared = [1 + n % 90 for n in range(40)]
    for number in range(30):
        harness.submit(prompt=[*shared, *(number + 1 for _ in range(60))], max_new_tokens=3)
        harness.run_until_idle()
    report = harness.scheduler.report(harness.now_s)
    assert sum(report.residency["lifetime"].counts) == sum(report.residency["idle_before_evict"].counts) > 0
    assert 0 < report.totals.cached_tokens < report.totals.prompt_tokens
    assert report.totals.prompt_host_tokens == report.totals.prompt_tier_tokens == 0
