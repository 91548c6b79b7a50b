"""Pages by id, without their contents: free ones (`PageAllocator`), those that eviction can free (`PageSupply`), those
that another engine writes (`IncomingPages`), and those of the host (`SwapPool`).

Pages are 1..num_pages. Page 0 is the dummy page, which is never handed out. Free pages are a stack: the page that was
freed last is used first, because it is the likeliest to be in a cache.
"""

from __future__ import annotations

import numpy as np

from ...runtime.errors import EngineError
from ..arrays import EMPTY, AnyIntArray, BoolArray, IntArray
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

    def take(self, count: int) -> IntArray:
        """Take `count` pages, [count] int32; evict if too few are free.

        Raises:
            LedgerError: fewer are available. A bug: the caller checks `num_available`.
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
        pages = self._supply.take(count)
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


class SwapPool:
    """Host pages for the KV of swapped requests. Ids are 0..num_pages-1; with 0 pages no request is swapped.

    The runner copies to the host before anything else of a step, so the device pages can be reused in the same pass.
    It copies to the device before the step reads KV, so host pages are free as soon as their copy is planned.

    Attributes:
        swapped_out_pages_total, swapped_in_pages_total: copies planned so far.
    """

    def __init__(self, num_pages: int) -> None:
        self._allocator = PageAllocator(num_pages)
        self._outs: list[IntArray] = []
        self._ins: list[IntArray] = []
        self._swap_in_reserved = False
        self.swapped_out_pages_total = 0
        self.swapped_in_pages_total = 0

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self._allocator.num_pages

    @property
    def num_free(self) -> int:
        """Pages that `swap_out` can take."""
        return self._allocator.num_free

    @property
    def has_outs(self) -> bool:
        """Whether copies to the host are planned for the next step. Then that step copies none to the device."""
        return bool(self._outs)

    @property
    def swap_in_reserved(self) -> bool:
        """Whether a swapped request returns in the next step. Then that step copies none to the host."""
        return self._swap_in_reserved

    def swap_out(self, pages: IntArray) -> IntArray:
        """Plan to copy pages [n] to the host; return [n] host pages. The caller has checked `num_free`."""
        assert not self._swap_in_reserved, "in and out in the same step"
        host_pages = self._allocator.allocate(len(pages)) - 1
        self._outs.append(np.stack([pages, host_pages], axis=1))
        self.swapped_out_pages_total += len(pages)
        return host_pages.astype(np.int32)

    def reserve_swap_in(self) -> None:
        """Note that a swapped request was admitted. `swap_in` follows at the end of the pass, with its pages."""
        self._swap_in_reserved = True

    def swap_in(self, host_pages: IntArray, pages: IntArray) -> None:
        """Plan to copy host pages [n] to device pages [n]."""
        if len(pages):
            assert not self._outs, "in and out in the same step"
            self._ins.append(np.stack([host_pages, pages], axis=1))
            self.swapped_in_pages_total += len(pages)

    def free(self, host_pages: IntArray) -> None:
        """Free host pages."""
        self._allocator.free(host_pages + 1)

    def take_copies(self) -> tuple[IntArray, IntArray]:
        """([O, 2] to the host, [I, 2] to the device): the copies planned since the last call, for `StepPlan`."""
        outs, ins = self._outs, self._ins
        self._outs, self._ins = [], []
        self._swap_in_reserved = False
        return _joined(outs), _joined(ins)


def _joined(parts: list[IntArray]) -> IntArray:
    return np.concatenate(parts) if parts else EMPTY
