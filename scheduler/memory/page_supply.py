"""`PageSupply`: gives out free pages, and evicts from the prefix cache when there are too few.

`KVMemory` takes pages from it and gives them back. `KVMemory` also keeps track of the owners.
"""

from __future__ import annotations

from ..arrays import AnyIntArray, IntArray
from ..prefix_cache.base import PrefixCache
from .page_allocator import PageAllocator


class PageSupply:
    """See the module.

    Attributes:
        evicted_total: pages evicted from the prefix cache so far.
    """

    def __init__(self, allocator: PageAllocator, prefix_cache: PrefixCache) -> None:
        self._allocator = allocator
        self._cache = prefix_cache
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

    def take(self, count: int) -> IntArray:
        """Take `count` pages, [count] int32; evict if too few are free.

        Raises:
            PageError: fewer are available. A bug: the caller checks `num_available`.
        """
        missing = count - self._allocator.num_free
        if missing > 0:
            evicted = self._cache.evict(missing)
            self.evicted_total += len(evicted)
            self._allocator.free(evicted)
        return self._allocator.allocate(count)

    def give_back(self, pages: AnyIntArray) -> None:
        """Take back pages that have no owner any more."""
        self._allocator.free(pages)
