"""`pages.py`: free pages first, then pages evicted from the prefix cache."""

from __future__ import annotations

import numpy as np
import pytest

from engine.scheduler.arrays import IntArray
from engine.scheduler.memory.pages import LedgerError, PageAllocator, PageSupply
from engine.scheduler.prefix_cache.base import PrefixCache


class Cache(PrefixCache):
    """A prefix cache that holds the given pages, all of them evictable."""

    def __init__(self, pages: IntArray) -> None:
        self.pages = pages

    @property
    def evictable_pages(self) -> int:
        return len(self.pages)

    def evict(self, num_pages: int, *, to_host: bool = False) -> IntArray:
        dropped, self.pages = self.pages[:num_pages], self.pages[num_pages:]
        return dropped


def make_supply(num_pages: int, num_cached: int) -> tuple[PageSupply, Cache]:
    allocator = PageAllocator(num_pages)
    cache = Cache(allocator.allocate(num_cached))
    return PageSupply(allocator, cache), cache


def test_it_evicts_only_what_is_missing():
    supply, cache = make_supply(10, 6)
    assert (supply.num_free, supply.num_available) == (4, 10)

    first = supply.take(3)
    assert (supply.evicted_total, cache.evictable_pages) == (0, 6)
    second = supply.take(3)

    assert (supply.evicted_total, cache.evictable_pages) == (2, 4)
    assert (supply.num_free, supply.num_available) == (0, 4)
    assert np.unique([*first, *second, *cache.pages]).size == 10


def test_pages_given_back_are_free():
    supply, _ = make_supply(4, 0)
    pages = supply.take(4)

    supply.give_back(pages[1:3])

    assert sorted(supply.take(2)) == sorted(pages[1:3])


def test_more_than_is_available_is_an_error():
    supply, _ = make_supply(4, 2)
    with pytest.raises(LedgerError, match="5 pages requested, 4 of 4 are free"):
        supply.take(5)
