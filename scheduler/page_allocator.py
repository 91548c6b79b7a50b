"""`PageAllocator`: which pages of the KV pool are free. It knows ids, not contents and not owners.

Pages are 1..num_pages; page 0 is the dummy page and is never handed out. The last page freed is the first one used
again: it is the likeliest to be in a cache.
"""

from __future__ import annotations

import numpy as np

from ..runtime.errors import EngineError
from .arrays import AnyIntArray, IntArray


class PageError(EngineError):
    """A page was asked for that does not exist, or given back twice: a bug of the scheduler, not of a request."""


class PageAllocator:
    """A stack of free pages."""

    __slots__ = ("_is_free", "_least_free", "_num_free", "_stack", "num_pages")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._stack: IntArray = np.arange(num_pages, 0, -1, dtype=np.int32)
        self._num_free = self._least_free = num_pages
        self._is_free = np.ones(num_pages + 1, dtype=np.bool_)
        self._is_free[0] = False

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out."""
        return self._num_free

    @property
    def highest_used(self) -> int:
        """The highest id that was ever handed out; 0 if none was."""
        return self.num_pages - self._least_free

    def allocate(self, count: int) -> IntArray:
        """Take `count` pages; [count] int32, all different.

        Raises:
            PageError: fewer are free. Callers make room first (see `KVMemory`), so this is a bug.
        """
        if count > self._num_free:
            raise PageError(f"{count} pages wanted, {self._num_free} of {self.num_pages} are free")
        bottom = self._num_free - count
        pages = self._stack[bottom : self._num_free][::-1].copy()
        self._num_free = bottom
        self._least_free = min(self._least_free, bottom)
        self._is_free[pages] = False
        return pages

    def free(self, pages: AnyIntArray) -> None:
        """Take pages back.

        Raises:
            PageError: one of them is free already, or is no page; nothing is changed then.
        """
        if not pages.size:
            return
        if pages.min() < 1 or pages.max() > self.num_pages:
            raise PageError(f"page ids must lie in [1, {self.num_pages}], got {pages.min()}..{pages.max()}")
        if self._num_free + pages.size > self.num_pages or self._is_free[pages].any():
            raise PageError(f"pages {pages[self._is_free[pages]][:8].tolist()} are given back twice")
        self._is_free[pages] = True
        self._stack[self._num_free : self._num_free + pages.size] = pages
        self._num_free += int(pages.size)

    def free_pages(self) -> IntArray:
        """The ids of all free pages, in no order; for checks."""
        return self._stack[: self._num_free].copy()
