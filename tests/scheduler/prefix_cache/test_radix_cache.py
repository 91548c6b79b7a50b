"""Tests of `scheduler/prefix_cache/radix_cache.py`."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.prefix_cache.base import PrefixMatch
from engine.scheduler.prefix_cache.radix_cache import RadixCache
from tests.selection import examples


def ids(*tokens):
    return np.array(tokens, dtype=np.int32).tobytes()


def pages(*values):
    return np.array(values, dtype=np.int32)


def put(cache, tokens, its_pages, extra_key=""):
    """Insert a sequence; returns the pages the cache has for it."""
    lease = cache.lock(extra_key, PrefixMatch())
    kept = cache.extend(lease, ids(*tokens), pages(*its_pages))
    cache.release(lease)
    return kept.tolist()


def found(cache, tokens, limit=99, extra_key=""):
    """The pages of the longest match."""
    match = cache.match(extra_key, ids(*tokens), limit)
    lease = cache.lock(extra_key, match)
    result = cache.pages_of(lease).tolist()
    assert len(result) == match.num_pages
    cache.release(lease)
    return result


@pytest.fixture
def cache():
    return RadixCache(page_size=2)


def test_finds_the_longest_prefix_in_whole_pages(cache):
    put(cache, [1, 2, 3, 4, 5, 6], [11, 12, 13])

    assert found(cache, [1, 2, 3, 4, 5, 6]) == [11, 12, 13]
    assert found(cache, [1, 2, 3, 4, 9, 9]) == [11, 12]
    assert found(cache, [1, 2, 3, 9]) == [11]
    assert found(cache, [1, 2, 3, 4, 5]) == [11, 12]
    assert found(cache, [1, 9]) == []
    assert found(cache, [7, 8]) == []


def test_a_match_respects_its_limit(cache):
    put(cache, [1, 2, 3, 4, 5, 6], [11, 12, 13])

    assert found(cache, [1, 2, 3, 4, 5, 6], limit=2) == [11, 12]
    assert found(cache, [1, 2, 3, 4, 5, 6], limit=0) == []


def test_a_fork_splits_a_node_and_both_ends_are_found(cache):
    put(cache, [1, 2, 3, 4, 5, 6], [11, 12, 13])

    assert put(cache, [1, 2, 3, 4, 7, 8], [21, 22, 23]) == [11, 12, 23]

    assert found(cache, [1, 2, 3, 4, 5, 6]) == [11, 12, 13]
    assert found(cache, [1, 2, 3, 4, 7, 8]) == [11, 12, 23]
    assert sorted(cache.all_pages().tolist()) == [11, 12, 13, 23]


def test_a_look_up_changes_nothing(cache):
    put(cache, [1, 2, 3, 4, 5, 6], [11, 12, 13])
    generation = cache.generation

    cache.match("", ids(1, 2, 9, 9), 9)

    assert cache.generation == generation


def test_extending_a_lease_starts_where_it_ends(cache):
    lease = cache.lock("", PrefixMatch())
    cache.extend(lease, ids(1, 2), pages(11))
    put(cache, [1, 2, 3, 4], [21, 22])

    kept = cache.extend(lease, ids(3, 4, 5, 6), pages(12, 13))

    assert kept.tolist() == [22, 13]  # page 12 stays the caller's, somebody was faster
    assert lease.num_pages == 3
    assert cache.pages_of(lease).tolist() == [11, 22, 13]
    assert cache.locked_pages == 3 and cache.evictable_pages == 0
    cache.release(lease)
    assert cache.locked_pages == 0 and cache.evictable_pages == 3


def test_a_lease_survives_the_split_of_its_node(cache):
    put(cache, [1, 2, 3, 4, 5, 6], [11, 12, 13])
    lease = cache.lock("", cache.match("", ids(1, 2, 3, 4, 5, 6), 9))

    put(cache, [1, 2, 8, 8], [21, 22])

    assert cache.pages_of(lease).tolist() == [11, 12, 13]
    assert cache.verify([lease]) == []
    assert cache.evict(9).tolist() == [22]
    cache.release(lease)
    assert cache.verify([]) == []


def test_locked_pages_are_never_evicted(cache):
    put(cache, [1, 2, 3, 4], [11, 12])
    put(cache, [5, 6], [13])
    lease = cache.lock("", cache.match("", ids(1, 2), 9))

    assert sorted(cache.evict(9).tolist()) == [12, 13]

    assert found(cache, [1, 2, 3, 4]) == [11]
    cache.release(lease)
    assert cache.evict(9).tolist() == [11]
    assert cache.all_pages().size == 0


def test_the_least_recently_used_goes_first(cache):
    put(cache, [1, 1], [11])
    put(cache, [2, 2], [12])
    put(cache, [3, 3], [13])
    found(cache, [1, 1])

    assert [cache.evict(1).tolist() for _ in range(4)] == [[12], [13], [11], []]


def test_what_counts_as_use_is_the_end_of_it(cache):
    put(cache, [1, 1, 1, 1], [11, 12])
    put(cache, [2, 2], [13])
    long, short = (cache.lock("", cache.match("", ids(token, token), 9)) for token in (1, 2))
    put(cache, [3, 3], [14])

    cache.release(short)
    cache.release(long)

    assert [cache.evict(1).tolist() for _ in range(4)] == [[12], [14], [13], [11]]


def test_a_long_leaf_loses_its_end_only(cache):
    put(cache, [1, 2, 3, 4, 5, 6, 7, 8], [11, 12, 13, 14])

    assert cache.evict(1).tolist() == [14]
    assert cache.evict(2).tolist() == [12, 13]
    assert found(cache, [1, 2, 3, 4]) == [11]


def test_a_parent_becomes_evictable_with_its_last_child(cache):
    put(cache, [1, 2, 3, 4], [11, 12])
    put(cache, [1, 2, 5, 6], [0, 13])

    assert sorted(cache.evict(2).tolist()) == [12, 13]
    assert cache.evict(2).tolist() == [11]


def test_namespaces_never_meet(cache):
    put(cache, [1, 2, 3, 4], [11, 12], extra_key="alice")
    put(cache, [1, 2, 3, 4], [21, 22], extra_key="bob")

    assert found(cache, [1, 2, 3, 4], extra_key="alice") == [11, 12]
    assert found(cache, [1, 2, 3, 4], extra_key="bob") == [21, 22]
    assert found(cache, [1, 2, 3, 4]) == []


def test_an_empty_namespace_leaves_nothing_behind(cache):
    for salt in range(100):
        put(cache, [1, 2], [salt + 1], extra_key=f"salt-{salt}")
    cache.evict(100)

    assert len(cache._roots) == 0


def test_only_what_a_lock_would_pin_is_counted(cache):
    put(cache, [1, 2, 3, 4, 5, 6], [11, 12, 13])
    wanted = ids(1, 2, 3, 4, 5, 6)
    assert cache.unlocked_pages(cache.match("", wanted, 2)) == 2

    lease = cache.lock("", cache.match("", ids(1, 2), 9))
    assert cache.unlocked_pages(cache.match("", wanted, 9)) == 2
    assert cache.unlocked_pages(cache.match("", ids(1, 2), 9)) == 0
    cache.release(lease)


def test_forgetting_drops_the_end_that_nobody_else_uses(cache):
    put(cache, [1, 2, 3, 4, 5, 6, 7, 8], [11, 12, 13, 14])
    put(cache, [1, 2, 9, 9], [0, 15])
    other = cache.lock("", cache.match("", ids(1, 2, 3, 4), 9))
    lease = cache.lock("", cache.match("", ids(1, 2, 3, 4, 5, 6, 7, 8), 9))
    generation = cache.generation

    assert cache.forget(lease).tolist() == [13, 14]  # 12 is leased by the other

    assert cache.generation != generation
    assert cache.verify([other]) == []
    assert cache.forget(other).tolist() == [12]  # 11 has been extended by somebody
    assert found(cache, [1, 2, 9, 9]) == [11, 15]
    assert sorted(cache.evict(9).tolist()) == [11, 15]


class Model:
    """The cache as a plain dictionary: (namespace, prefix) -> page."""

    def __init__(self):
        self.pages = {}

    def longest(self, key, tokens, page_size):
        result = []
        for end in range(page_size, len(tokens) + 1, page_size):
            page = self.pages.get((key, tuple(tokens[:end])))
            if page is None:
                break
            result.append(page)
        return result


@settings(max_examples=examples(100))
@given(
    st.integers(1, 3),
    st.lists(
        st.tuples(
            st.sampled_from(["put", "put", "lock", "release", "forget", "evict"]),
            st.sampled_from(["", "k"]),
            st.lists(st.integers(0, 2), max_size=12),
            st.integers(0, 6),
        ),
        max_size=40,
    ),
)
def test_agrees_with_a_dictionary(page_size, operations):
    cache, model, leases, next_page = RadixCache(page_size), Model(), [], 1
    for operation, key, tokens, number in operations:
        tokens = tokens[: len(tokens) // page_size * page_size]
        if operation in ("put", "lock"):
            match = cache.match(key, ids(*tokens), 99)
            lease = cache.lock(key, match)
            assert cache.pages_of(lease).tolist() == model.longest(key, tokens, page_size)
            if operation == "put":
                start = match.num_pages
                count = len(tokens) // page_size - start
                offered = list(range(next_page, next_page + count))
                next_page += count
                kept = cache.extend(lease, ids(*tokens[start * page_size :]), pages(*offered)).tolist()
                for k, page in enumerate(kept):
                    end = (start + k + 1) * page_size
                    assert model.pages.setdefault((key, tuple(tokens[:end])), page) == page
                cache.release(lease)
            else:
                leases.append(lease)
        elif operation == "release" and leases:
            cache.release(leases.pop(number % len(leases)))
        elif operation == "forget" and leases:
            gone = set(cache.forget(leases.pop(number % len(leases))).tolist())
            assert not gone & {page for lease in leases for page in cache.pages_of(lease).tolist()}
            model.pages = {prefix: page for prefix, page in model.pages.items() if page not in gone}
        elif operation == "evict":
            before = cache.evictable_pages
            gone = set(cache.evict(number).tolist())
            assert len(gone) == min(number, before)
            assert not gone & {page for lease in leases for page in cache.pages_of(lease).tolist()}
            model.pages = {prefix: page for prefix, page in model.pages.items() if page not in gone}
        assert cache.verify(leases) == []
        assert sorted(cache.all_pages().tolist()) == sorted(model.pages.values())
