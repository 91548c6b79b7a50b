"""Pages by id, without their contents: free ones (`PageAllocator`), those that eviction can free (`PageSupply`), and
those that another engine or a tier writes (`IncomingPages`).

Pages are 1..num_pages. Page 0 is the dummy page, which is never handed out. Free pages are a stack: the page that was
freed last is used first, because it is the likeliest to be in a cache.
"""

from __future__ import annotations

import numpy as np

from ...runtime.errors import EngineError
from ..arrays import AnyIntArray, BoolArray, IntArray
from ..prefix_cache.base import Lease, PrefixCache


class LedgerError(EngineError):
    """Pages, rows, locks or adapter slots do not add up: a bug of the scheduler, not of a request."""


class PageAllocator:
    """A stack of free pages.

    Attributes:
        num_pages: free or not.
        num_free: pages that can be handed out.
        highest_used: the highest id that was ever handed out; 0 if none was.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = self.num_free = num_pages
        self.highest_used = 0
        self._free: IntArray = np.arange(
            num_pages, 0, -1, dtype=np.int32
        )  # the first num_free entries; the last is next
        self._is_free: BoolArray = np.ones(num_pages + 1, dtype=np.bool_)

    def allocate(self, count: int) -> IntArray:
        """Take `count` pages; [count] int32, all different.

        Raises:
            LedgerError: fewer are free. Callers evict first (see `KVMemory`), so this is a bug.
        """
        if count > self.num_free:
            raise LedgerError(f"{count} pages requested, {self.num_free} of {self.num_pages} are free")
        self.num_free -= count
        pages = self._free[self.num_free : self.num_free + count][::-1].copy()
        self._is_free[pages] = False
        if count:
            self.highest_used = max(self.highest_used, int(pages.max()))
        return pages

    def free(self, pages: AnyIntArray) -> None:
        """Take pages back. The first of them is the first that is used again.

        Raises:
            LedgerError: one of them is free already, or is no page; nothing is changed.
        """
        if not pages.size:
            return
        if pages.min() < 1 or pages.max() > self.num_pages:
            raise LedgerError(f"page ids must lie in [1, {self.num_pages}], got {pages.min()}..{pages.max()}")
        if self.num_free + pages.size > self.num_pages or self._is_free[pages].any():
            raise LedgerError(f"pages {pages[self._is_free[pages]][:8].tolist()} are given back twice")
        self._is_free[pages] = True
        self._free[self.num_free : self.num_free + pages.size] = pages[::-1]
        self.num_free += int(pages.size)

    def free_pages(self) -> IntArray:
        """The ids of all free pages, ascending; for checks."""
        return np.flatnonzero(self._is_free[1:]).astype(np.int32) + np.int32(1)


class PageSupply:
    """Gives out free pages of the KV pool, and evicts from the prefix cache when there are too few.

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

    def take(self, count: int, *, to_host: bool = True) -> IntArray:
        """Take `count` pages, [count] int32; evict if too few are free.

        Args:
            count: number of pages.
            to_host: nothing writes to them before the next step, so the host may copy what is evicted.

        Raises:
            LedgerError: fewer are available. A bug: the caller checks `num_available`.
        """
        missing = count - self._allocator.num_free
        if missing > 0:
            evicted = self._cache.evict(missing, to_host=to_host)
            self.evicted_total += len(evicted)
            self._allocator.free(evicted)
        return self._allocator.allocate(count)

    def give_back(self, pages: AnyIntArray) -> None:
        """Take back pages that have no owner any more."""
        self._allocator.free(pages)


class IncomingPages:
    """Pages that another engine or a disk tier writes, from their allocation until the prefix cache has them.

    They are a term of the page equation (`ledger.py`). No request owns them: a request with a prompt that is computed
    elsewhere has no row before the prompt has come.

    Attributes:
        num_pages: pages that are taken and neither adopted nor given back.
        num_read: pages that the prefix cache owns and that are locked because a disk tier reads them.
    """

    def __init__(self, supply: PageSupply, prefix_cache: PrefixCache) -> None:
        self._supply = supply
        self._cache = prefix_cache
        self._is_incoming: BoolArray = np.zeros(supply.num_pages + 1, dtype=np.bool_)
        self.num_pages = self.num_read = 0

    @property
    def will_give_back(self) -> bool:
        """Whether pages will come free that no request owns."""
        return bool(self.num_pages or self.num_read)

    def take(self, count: int) -> IntArray:
        """Allocate pages, [count] int32; evict if needed. The caller checks `KVMemory.available_pages`."""
        pages = self._supply.take(count, to_host=False)
        self._is_incoming[pages] = True
        self.num_pages += count
        return pages

    def adopt(self, lease: Lease, token_ids: bytes, pages: IntArray) -> None:
        """Give written pages to the prefix cache; where it has the same tokens already, they become free.

        Args:
            lease: of the prefix before them; grows.
            token_ids: int32 bytes of the tokens in the pages.
            pages: [n] the pages, written and taken before.
        """
        self._drop(pages)
        cached = self._cache.extend(lease, token_ids, pages)
        self._supply.give_back(pages[cached != pages] if cached.size else pages)

    def give_back(self, pages: AnyIntArray) -> None:
        """Free pages that nothing will be written to any more."""
        self._drop(pages)
        self._supply.give_back(pages)

    def all_pages(self) -> AnyIntArray:
        """All pages that are counted here; for checks."""
        return np.flatnonzero(self._is_incoming)

    def _drop(self, pages: AnyIntArray) -> None:
        assert self._is_incoming[pages].all(), pages
        self._is_incoming[pages] = False
        self.num_pages -= len(pages)
