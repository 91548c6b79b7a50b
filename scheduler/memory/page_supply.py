"""`PageSupply`: pages for requests: free ones, and where those are too few the ones that only the prefix cache has.

`KVMemory` asks it for pages and gives them back; whose a page is then is its matter.
"""

from __future__ import annotations

from typing import Final

from ..arrays import AnyIntArray, IntArray
from ..prefix_cache.base import PrefixCache
from .page_allocator import EXTENT_PAGES, PageAllocator

AHEAD_PART: Final = 32
"""Where the order of pages counts, some are evicted ahead of decodes' need while less than 1/32 of all is free.

A larger part costs more of the cache than order is worth: multi-turn chats of 26 sessions in 1,024 pages found 79 % of
their tokens cached without, 78 to 78.5 % with 1/32, 76 to 77 % with 1/16.
"""


class PageSupply:
    """See the module.

    Attributes:
        evicted_total: pages taken from the prefix cache because requests needed them, or will soon.
    """

    __slots__ = ("_allocator", "_cache", "_most_ahead", "evicted_total")

    def __init__(
        self, allocator: PageAllocator, prefix_cache: PrefixCache, *, reads_in_order: bool = False
    ) -> None:
        """`reads_in_order`: whether it is worth something that a request's pages lie after each other."""
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
        """Pages that nobody owns."""
        return self._allocator.num_free

    @property
    def num_available(self) -> int:
        """Pages that `take` could give: free ones and evictable ones."""
        return self._allocator.num_free + self._cache.evictable_pages

    @property
    def highest_used(self) -> int:
        """The highest page id that anybody ever had; 0 if nobody had one."""
        return self._allocator.highest_used

    def take(self, count: int, after: int) -> IntArray:
        """So many pages, evicting where needed; after page `after` (0: none) and each other as far as possible.

        Raises:
            PageError: there are not so many. A bug: the caller knows `num_available`.
        """
        self._make_room(count)
        return self._allocator.allocate(count, after)

    def take_after(self, pages: IntArray) -> IntArray:
        """One page for each of `pages` [n], after it if possible; 0 is after none.

        Raises:
            PageError: see `take`.
        """
        self._make_room(len(pages))
        self._make_room_behind(pages)
        return self._allocator.allocate_after(pages)

    def give_back(self, pages: AnyIntArray) -> None:
        """Pages that nobody owns any more."""
        self._allocator.free(pages)

    def _make_room(self, count: int) -> None:
        """Evict, so that `count` pages are free."""
        missing = count - self._allocator.num_free
        if missing > 0:
            self._evict(missing)

    def _make_room_behind(self, pages: IntArray) -> None:
        """Evict a little more, so that who is at the end of an extent may get the next one for itself.

        Page after page would come from as many places of the cache, and be read as slowly.
        """
        most = self._most_ahead - self._allocator.num_free
        if most > 0 and (extents := self._allocator.num_extents_needed(pages)):
            self._evict(min(extents * EXTENT_PAGES, most), spare_pins=True)

    def _evict(self, num_pages: int, *, spare_pins: bool = False) -> None:
        evicted = self._cache.evict(num_pages, spare_pins=spare_pins)
        self.evicted_total += len(evicted)
        self._allocator.free(evicted)
