"""`PageSupply`: gives out free pages, and evicts from the prefix cache when there are too few.

`KVMemory` takes pages from it and gives them back. `KVMemory` also keeps track of the owners.
"""

from __future__ import annotations

from typing import Final

from ..arrays import AnyIntArray, IntArray
from ..prefix_cache.base import PrefixCache
from .page_allocator import EXTENT_PAGES, PageAllocator

AHEAD_PART: Final = 32
"""Where contiguous runs matter, pages are evicted ahead of the need of decodes while less than 1/32 of all is free.

A larger part loses more cache hits than contiguous runs are worth: multi-turn chats of 26 sessions in 1,024 pages found
79 % of their tokens cached without it, 78 to 78.5 % with 1/32, 76 to 77 % with 1/16.
"""


class PageSupply:
    """See the module.

    Attributes:
        evicted_total: pages evicted from the prefix cache so far, on demand or ahead of demand.
    """

    __slots__ = ("_allocator", "_cache", "_most_ahead", "evicted_total")

    def __init__(
        self, allocator: PageAllocator, prefix_cache: PrefixCache, *, reads_in_order: bool = False
    ) -> None:
        """`reads_in_order`: whether attention is faster when the pages of a request are contiguous."""
        self._allocator = allocator
        self._cache = prefix_cache
        self._most_ahead = (
            allocator.num_pages // AHEAD_PART // EXTENT_PAGES * EXTENT_PAGES if reads_in_order else 0
        )
        self.evicted_total = 0

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self._allocator.num_pages

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        return self._allocator.num_free

    @property
    def num_available(self) -> int:
        """Pages that `take` can return: free pages and evictable pages."""
        return self._allocator.num_free + self._cache.evictable_pages

    @property
    def highest_used(self) -> int:
        """The highest page id that was ever allocated; 0 if none was."""
        return self._allocator.highest_used

    def take(self, count: int, after: int) -> IntArray:
        """Take `count` pages; evict if needed. They follow page `after` (0: none) and each other where possible.

        Raises:
            PageError: fewer are available. A bug: the caller checks `num_available`.
        """
        self._make_room(count)
        return self._allocator.allocate(count, after)

    def take_after(self, pages: IntArray) -> IntArray:
        """Take one page to follow each of `pages` [n] where possible; for 0 see `PageAllocator.allocate_after`.

        Raises:
            PageError: see `take`.
        """
        self._make_room(len(pages))
        self._make_room_behind(pages)
        return self._allocator.allocate_after(pages)

    def give_back(self, pages: AnyIntArray) -> None:
        """Take back pages that have no owner any more."""
        self._allocator.free(pages)

    def _make_room(self, count: int) -> None:
        """Evict, so that `count` pages are free."""
        missing = count - self._allocator.num_free
        if missing > 0:
            self._evict(missing)

    def _make_room_behind(self, pages: IntArray) -> None:
        """Evict up to a few extents more, so that a row at the end of its extent can get a wholly free extent.

        Pages that are evicted one at a time come from scattered places, and scattered pages are slower to read.
        """
        most = self._most_ahead - self._allocator.num_free
        if most > 0 and (extents := self._allocator.num_extents_needed(pages)):
            self._evict(min(extents * EXTENT_PAGES, most), spare_pins=True)

    def _evict(self, num_pages: int, *, spare_pins: bool = False) -> None:
        evicted = self._cache.evict(num_pages, spare_pins=spare_pins)
        self.evicted_total += len(evicted)
        self._allocator.free(evicted)
