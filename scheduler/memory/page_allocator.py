"""`PageAllocator`: the free pages of the KV pool. It knows page ids; it knows neither contents nor owners.

Page ids are 1..num_pages. Page 0 is the dummy page and is never allocated.

Attention reads the pages of a request in order. Reading is slower if they are scattered, because the hardware
prefetcher cannot follow. So pages are divided into *extents* of eight neighbors:

    extent   | 1  2  3  4  5  6  7  8 | 9 10 11 12 13 14 15 16 | 17 ...
    owner    | a  a  a  b  b  .  .  . | c  c  .  .  .  .  .  . |  .        . is free

A row that grows gets the page after its last one if that page is free and in the same extent. Otherwise it gets the
first page of a wholly free extent, and the rest of that extent stays free for its next pages. This is no reservation:
when no extent is wholly free, any request gets pages of such rests. The extent that became free last is used first,
because its memory is most likely still in a CPU cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from ...runtime.errors import EngineError
from ..arrays import AnyIntArray, BoolArray, IntArray

EXTENT_PAGES: Final = 8
"""Pages of an extent: 128 tokens at 16 tokens per page."""

_IN_EXTENT: Final = np.arange(EXTENT_PAGES, dtype=np.int32)


class PageError(EngineError):
    """Too many pages were requested, or a page was freed twice: a bug of the scheduler, not of a request."""


class PageAllocator:
    """Free pages by extent: a stack of wholly free extents, and a list of extents with some free pages.

    Entries of the list may be out of date; `_take_some` skips those. Decodes take from the beginning of the list, where
    the extents that changed longest ago are; prompts take from its end.

    Attributes:
        num_pages: all pages, free or not.
        num_free: pages that can be allocated.
        highest_used: the highest page id that was ever allocated; 0 if none was.
    """

    # Positions count from 0: page p has position p - 1, and extent e the positions from e * EXTENT_PAGES.
    __slots__ = (
        "_free_at",
        "_free_in",
        "_is_free",
        "_is_listed",
        "_num_free_in",
        "_num_whole",
        "_some",
        "_whole",
        "highest_used",
        "num_free",
        "num_pages",
    )

    def __init__(self, num_pages: int) -> None:
        num_whole, rest = divmod(num_pages, EXTENT_PAGES)
        num_extents = num_whole + bool(rest)
        self.num_pages = self.num_free = num_pages
        self.highest_used = 0
        self._is_free: BoolArray = np.arange(num_extents * EXTENT_PAGES) < num_pages
        self._num_free_in = self._is_free.reshape(-1, EXTENT_PAGES).sum(axis=1, dtype=np.int32)
        # Memory views of the same two arrays: reading one element takes a third of the time.
        self._free_at, self._free_in = self._is_free.data, self._num_free_in.data
        self._whole: IntArray = np.zeros(num_extents, dtype=np.int32)
        self._whole[:num_whole] = np.arange(num_whole - 1, -1, -1)
        self._num_whole = num_whole
        self._some: deque[int] = deque()
        self._is_listed = bytearray(num_extents)
        if rest:
            self._list(num_whole)

    def allocate(self, count: int, after: int = 0) -> IntArray:
        """Take `count` pages; [count] int32, all different.

        Args:
            count: number of pages.
            after: the page after which attention reads the new pages; 0: none.

        Raises:
            PageError: fewer pages are free. Callers evict first (see `PageSupply`), so this is a bug.
        """
        self._check(count)
        next_ones = self._take_after(after, count)
        num_whole, rest = divmod(count - len(next_ones), EXTENT_PAGES)
        whole = self._take_whole(num_whole)
        rest += (num_whole - len(whole)) * EXTENT_PAGES
        last = self._begin_extent(rest)
        single = last + self._take_some(rest - len(last), self._some.pop)
        return self._hand_out(
            np.concatenate((np.array(next_ones, np.int32), whole.ravel(), np.array(single, np.int32)))
        )

    def allocate_after(self, pages: IntArray) -> IntArray:
        """Take one page to follow each of `pages`; [len(pages)] int32, all different.

        Args:
            pages: [n] the last page of a row; 0: the new page follows the one that the entry before gets.

        Raises:
            PageError: see `allocate`.
        """
        self._check(len(pages))
        positions: list[int] = []
        for page in pages.tolist():
            after = page or positions[-1] + 1
            positions += (
                self._take_after(after, 1) or self._begin_extent(1) or self._take_some(1, self._some.popleft)
            )
        return self._hand_out(np.array(positions, dtype=np.int32))

    def num_extents_needed(self, pages: IntArray) -> int:
        """Extents missing so that each of `pages` (0: skipped) can be followed in its extent or by a free extent."""
        at_end = sum(1 for page in pages.tolist() if page and not self._has_next(page))
        return max(at_end - self._num_whole, 0)

    def free(self, pages: AnyIntArray) -> None:
        """Free pages.

        Raises:
            PageError: one of them is free already or does not exist; then nothing changes.
        """
        if not pages.size:
            return
        if pages.min() < 1 or pages.max() > self.num_pages:
            raise PageError(f"page ids must lie in [1, {self.num_pages}], got {pages.min()}..{pages.max()}")
        positions = pages - 1
        if self.num_free + pages.size > self.num_pages or self._is_free[positions].any():
            raise PageError(f"pages {pages[self._is_free[positions]][:8].tolist()} are given back twice")
        self._is_free[positions] = True
        self.num_free += int(pages.size)
        extents, counts = np.unique(positions // EXTENT_PAGES, return_counts=True)
        self._num_free_in[extents] += counts.astype(np.int32)
        for extent in extents[::-1].tolist():  # so that the lowest extent is used first
            if self._free_in[extent] == EXTENT_PAGES:
                self._whole[self._num_whole] = extent
                self._num_whole += 1
            else:
                self._list(extent)

    def free_pages(self) -> IntArray:
        """The ids of all free pages, in ascending order; for checks."""
        return np.flatnonzero(self._is_free).astype(np.int32) + np.int32(1)

    # ------------------------------------------------------------ taking positions

    def _check(self, count: int) -> None:
        if count > self.num_free:
            raise PageError(f"{count} pages requested, {self.num_free} of {self.num_pages} are free")

    def _has_next(self, page: int) -> bool:
        """Whether the page after it is free and in the same extent.

        False in a wholly free extent: those are allocated from their first page on.
        """
        # Page p has position p - 1, so p is the position of the page after it.
        return bool(
            page % EXTENT_PAGES
            and page < len(self._free_at)
            and self._free_at[page]
            and self._free_in[page // EXTENT_PAGES] < EXTENT_PAGES
        )

    def _take_after(self, page: int, count: int) -> list[int]:
        """Take the consecutive free positions after a page, up to the end of its extent; at most `count`."""
        if not count or not self._has_next(page):
            return []
        end, stop = page + 1, min(page + count, (page // EXTENT_PAGES + 1) * EXTENT_PAGES)
        while end < stop and self._free_at[end]:
            end += 1
        return self._take_run(page, end)

    def _begin_extent(self, count: int) -> list[int]:
        """Take the first `count` positions of a wholly free extent, at most all of it; none without such an extent."""
        if not count or not self._num_whole:
            return []
        self._num_whole -= 1
        begin = int(self._whole[self._num_whole]) * EXTENT_PAGES
        return self._take_run(begin, begin + min(count, EXTENT_PAGES))

    def _take_run(self, begin: int, end: int) -> list[int]:
        """Take the positions from `begin` to `end`, which are in one extent."""
        extent = begin // EXTENT_PAGES
        for position in range(begin, end):
            self._free_at[position] = False
        self._free_in[extent] -= end - begin
        if self._free_in[extent]:
            self._list(extent)
        return list(range(begin, end))

    def _take_whole(self, count: int) -> IntArray:
        """Take up to `count` wholly free extents; [n, EXTENT_PAGES] int32, their positions."""
        count = min(count, self._num_whole)
        self._num_whole -= count
        extents = self._whole[self._num_whole : self._num_whole + count][::-1]
        self._is_free.reshape(-1, EXTENT_PAGES)[extents] = False
        self._num_free_in[extents] = 0
        return extents[:, None] * np.int32(EXTENT_PAGES) + _IN_EXTENT

    def _take_some(self, count: int, next_extent: Callable[[], int]) -> list[int]:
        """Take any `count` free positions of partly free extents; used when no extent is wholly free."""
        found: list[int] = []
        while len(found) < count:
            extent = next_extent()
            begin = extent * EXTENT_PAGES
            free = [begin + n for n in range(EXTENT_PAGES) if self._free_at[begin + n]][: count - len(found)]
            for position in free:
                self._free_at[position] = False
            self._free_in[extent] -= len(free)
            self._is_listed[extent] = False
            if self._free_in[extent]:
                self._list(extent)
            found += free
        return found

    def _list(self, extent: int) -> None:
        """Add an extent with some free pages to the list."""
        if not self._is_listed[extent]:
            self._is_listed[extent] = True
            self._some.append(extent)

    def _hand_out(self, positions: IntArray) -> IntArray:
        self.num_free -= int(positions.size)
        pages = positions + np.int32(1)
        if pages.size:
            self.highest_used = max(self.highest_used, int(pages.max()))
        return pages
