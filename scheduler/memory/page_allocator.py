"""`PageAllocator`: which pages of the KV pool are free. It knows ids, but neither contents nor owners.

Pages are 1..num_pages. Page 0 is the dummy page, which is never handed out. Free pages are a stack: the page that was
freed last is used first, because it is the likeliest to be in a cache.
"""

from __future__ import annotations

import numpy as np

from ...runtime.errors import EngineError
from ..arrays import AnyIntArray, BoolArray, IntArray


class PageError(EngineError):
    """A page was requested that does not exist, or given back twice: a bug of the scheduler, not of a request."""


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
            PageError: fewer are free. Callers evict first (see `KVMemory`), so this is a bug.
        """
        if count > self.num_free:
            raise PageError(f"{count} pages requested, {self.num_free} of {self.num_pages} are free")
        self.num_free -= count
        pages = self._free[self.num_free : self.num_free + count][::-1].copy()
        self._is_free[pages] = False
        if count:
            self.highest_used = max(self.highest_used, int(pages.max()))
        return pages

    def free(self, pages: AnyIntArray) -> None:
        """Take pages back. The first of them is the first that is used again.

        Raises:
            PageError: one of them is free already, or is no page; nothing is changed.
        """
        if not pages.size:
            return
        if pages.min() < 1 or pages.max() > self.num_pages:
            raise PageError(f"page ids must lie in [1, {self.num_pages}], got {pages.min()}..{pages.max()}")
        if self.num_free + pages.size > self.num_pages or self._is_free[pages].any():
            raise PageError(f"pages {pages[self._is_free[pages]][:8].tolist()} are given back twice")
        self._is_free[pages] = True
        self._free[self.num_free : self.num_free + pages.size] = pages[::-1]
        self.num_free += int(pages.size)

    def free_pages(self) -> IntArray:
        """The ids of all free pages, ascending; for checks."""
        return np.flatnonzero(self._is_free[1:]).astype(np.int32) + np.int32(1)
