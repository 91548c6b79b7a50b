"""Tests of `scheduler/prefix_cache/base.py`."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.scheduler.prefix_cache.base import PrefixCache, PrefixMatch, namespace_of
from engine.scheduler.records.verdict import CacheMiss, MissKind
from tests.scheduler.prefix_cache.cached_pool import CachedPool, ids

# Arbitrary strings of clients, and above all those that look like an encoding.
NAMES = st.text(max_size=6) | st.text("0123456789:\0|,", max_size=6)


@given(NAMES, NAMES, NAMES, NAMES)
@example("a", "", "", "a")
@example("1:b", "", "", "b")
@example(":a", "", "a", "")
@example("b", "a", "", "ab")
@example("", "1:a", "a", "1")
@example("0:", "", "", "")
def test_two_pairs_never_have_the_same_namespace(salt, adapter, other_salt, other_adapter):
    same = namespace_of(salt, adapter) == namespace_of(other_salt, other_adapter)

    assert same == ((salt, adapter) == (other_salt, other_adapter))


@given(NAMES, NAMES, NAMES)
def test_no_salt_reaches_into_a_namespace_with_an_adapter(salt, adapter, guess):
    """Not even one made from the very text of that namespace."""
    if adapter:
        assert namespace_of(namespace_of(salt, adapter), "") != namespace_of(salt, adapter)
        assert namespace_of(guess, "") != namespace_of(salt, adapter)


def test_without_salt_and_adapter_it_is_the_common_one():
    assert namespace_of("", "") == ""


@pytest.mark.parametrize(
    "pair", [("", ""), ("salt", ""), ("", "salt"), ("4:salt", ""), ("lt", "sa"), ("0:salt", "")]
)
def test_equal_tokens_are_found_in_their_own_namespace_only(pair):
    pool = CachedPool(64)
    everybody = [("", ""), ("salt", ""), ("", "salt"), ("4:salt", ""), ("lt", "sa"), ("0:salt", "")]

    pool.serve([1, 2, 3], namespace_of(*pair))

    found = {other: pool.cached([1, 2, 3], namespace_of(*other)) for other in everybody}
    assert found == {other: 3 if other == pair else 0 for other in everybody}


def test_the_cache_that_keeps_nothing_answers_all_the_same():
    cache: PrefixCache = PrefixCache()
    match = cache.match("", ids(1, 2, 3), 2)
    lease = cache.lock("", match, 7)

    assert match == PrefixMatch()
    assert (lease.num_pages, lease.priority) == (0, 7)
    assert cache.pin("", ids(1, 2, 3), 10.0) == 0
    cache.unpin("", ids(1, 2, 3))
    cache.expire_pins(11.0)
    assert (cache.pinned_pages, cache.evictable_pages, cache.locked_pages) == (0, 0, 0)
    assert cache.explain("", ids(1, 2, 3), match, "r") == CacheMiss("r", 3, 0, MissKind.OFF, 0)
