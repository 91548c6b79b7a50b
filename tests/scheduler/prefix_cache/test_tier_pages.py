"""Pages of a radix tree that a tier has: which leaves it is given, and that these go before their neighbors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.scheduler.prefix_cache.base import PrefixMatch, Session
from engine.scheduler.prefix_cache.radix_cache import RadixCache
from engine.scheduler.prefix_cache.radix_node import nodes_of


def ids(*tokens: int) -> bytes:
    return np.array(tokens, dtype=np.int32).tobytes()


def put(cache: RadixCache, *tokens: int, first_page: int = 0, extra_key: str = "", **lease: Any) -> None:
    """Insert a sequence of pages with a token each."""
    match = cache.match(extra_key, ids(*tokens), 99)
    held = cache.lock(extra_key, match, **lease)
    rest = tokens[match.num_pages :]
    cache.extend(held, ids(*rest), np.arange(first_page, first_page + len(rest), dtype=np.int32))
    cache.release(held)


def stored(cache: RadixCache) -> dict[int, int]:
    """For each page whether a tier has it, by the numbers of the nodes."""
    found: dict[int, int] = {}
    for node in nodes_of(cache._roots):
        assert 0 <= node.num_stored <= len(node.pages)
        found |= {int(page): int(index < node.num_stored) for index, page in enumerate(node.pages)}
    return found


@pytest.fixture
def cache() -> RadixCache:
    return RadixCache(page_size=1, stored_window_pages=6)


def test_the_leaves_that_are_evicted_next_are_given_once(cache: RadixCache) -> None:
    put(cache, 1, 2, 3, first_page=10)
    put(cache, 1, 2, 4, first_page=20, extra_key="other")
    put(cache, 1, 2, 5, 6, first_page=30)

    assert cache.take_unstored(1, 1) == [("", ids(1, 2, 3))]
    assert cache.take_unstored(4, 1) == [("other", ids(1, 2, 4))]
    assert cache.take_unstored(99, 1) == [("", ids(1, 2, 5, 6))]
    assert cache.take_unstored(99, 1) == []
    assert set(stored(cache).values()) == {1}
    put(cache, 1, 2, 3, 9, first_page=40)
    assert cache.take_unstored(99, 1) == [("", ids(1, 2, 3, 9))]
    cache.forget_stored()
    assert set(stored(cache).values()) == {0} and len(cache.take_unstored(99, 1)) == 3


def test_short_private_and_dead_prefixes_and_those_of_running_requests_are_left_out(
    cache: RadixCache,
) -> None:
    put(cache, 1, 2, first_page=10)
    put(cache, 3, 4, 5, first_page=20, in_memory=True)
    session = Session("a")
    held = cache.lock("", PrefixMatch())
    cache.extend(held, ids(6, 7, 8), np.arange(30, 33, dtype=np.int32))
    assert cache.take_unstored(99, 3) == []
    cache.release(held, once=True, session=session)
    assert cache.take_unstored(99, 3) == []

    put(cache, 3, 4, 5, is_use=False)
    assert cache.take_unstored(99, 3) == [], "a copy of the pages is no use of them"
    put(cache, 3, 4, 5, in_memory=True)
    assert cache.take_unstored(99, 3) == []
    put(cache, 3, 4, 5)
    assert cache.take_unstored(99, 3) == [("", ids(3, 4, 5))]


def test_what_only_private_prompts_share_is_left_out(cache: RadixCache) -> None:
    put(cache, 1, 2, 3, first_page=10, in_memory=True)
    put(cache, 1, 2, 4, first_page=20, in_memory=True)
    assert sorted(cache.evict(2).tolist()) == [12, 20]

    assert cache.take_unstored(99, 1) == []
    put(cache, 1, 2)
    assert cache.take_unstored(99, 1) == [("", ids(1, 2))]


def test_wanted_leaves_are_given_when_no_others_are_left(cache: RadixCache) -> None:
    put(cache, 1, 2, first_page=10)
    put(cache, 3, 4, first_page=20)
    cache.want(7, cache.match("", ids(1, 2), 2), 5)

    assert cache.take_unstored(2, 1) == [("", ids(3, 4))]
    assert cache.take_unstored(4, 1) == [("", ids(1, 2))]


def test_stored_pages_follow_splits_and_cuts(cache: RadixCache) -> None:
    put(cache, 1, 2, 3, 4, first_page=10)
    cache.take_unstored(4, 1)
    put(cache, 1, 2, 9, first_page=20)
    assert stored(cache) == {10: 1, 11: 1, 12: 1, 13: 1, 20: 0}
    assert cache.evict(1).tolist() == [13], "the end of a leaf that is stored"
    assert stored(cache) == {10: 1, 11: 1, 12: 1, 20: 0}
    put(cache, 1, 2, 3, 5, first_page=30)
    assert stored(cache) == {10: 1, 11: 1, 12: 1, 20: 0, 30: 0}
    held = cache.lock("", cache.match("", ids(1, 2, 3, 5), 9))
    cache.note_stored(held)
    cache.release(held)
    assert stored(cache) == {10: 1, 11: 1, 12: 1, 20: 0, 30: 1}
    assert not cache.verify([])


@pytest.mark.parametrize(
    ("window_pages", "evicted"), [(0, [10, 11]), (2, [10, 11]), (3, [20, 21]), (9, [20, 21])]
)
def test_of_the_pages_that_are_evicted_next_the_stored_ones_go_first(
    window_pages: int, evicted: list[int]
) -> None:
    cache = RadixCache(page_size=1, stored_window_pages=window_pages)
    put(cache, 1, 2, first_page=10)
    put(cache, 3, 4, first_page=20)
    put(cache, 5, 6, first_page=30)
    held = cache.lock("", cache.match("", ids(3, 4), 2), is_use=False)
    cache.note_stored(held)
    cache.release(held)

    assert cache.evict(2).tolist() == evicted
    assert not cache.verify([])
    assert sorted(cache.evict(9).tolist()) == sorted({10, 11, 20, 21, 30, 31} - {*evicted})


def test_when_nothing_is_stored_the_order_is_that_of_the_policy(cache: RadixCache) -> None:
    for number in range(6):
        put(cache, number, number + 10, first_page=10 * number)
    assert [cache.evict(2).tolist()[0] for _ in range(6)] == [0, 10, 20, 30, 40, 50]
