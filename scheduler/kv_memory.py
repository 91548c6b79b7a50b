"""`KVMemory`: every page of KV memory changes hands here, between the free pages, the prefix cache and the requests.

It composes the allocator, the page tables and the prefix cache, and keeps their one invariant: a page has exactly one
owner (see `ledger.py`). Requests own the pages of their row beyond their lease.

Why pages can be given back while a step in flight still uses them: the runner executes steps strictly in the order of
their launch, and whoever gets a page next uses it in a step that is planned, hence launched, later. So a late write
of an old step always lands before the new owner's first write, and a late read before it too. What must never happen
is that such a page is in the prefix cache when the late write comes; therefore only KV that settled steps have made
is offered to the cache (`RowStates.num_settled`), and a step in flight writes behind that.
"""

from __future__ import annotations

import numpy as np

from ..runtime.feasibility import pages_for
from .arrays import IntArray
from .page_allocator import PageAllocator
from .prefix_cache import PrefixCache, PrefixMatch
from .req import Req
from .req_to_token_pool import ReqToTokenPool
from .row_states import RowStates

_NO_MATCH = PrefixMatch()


class KVMemory:
    """Pages for rows.

    Attributes:
        evicted_pages_total: pages taken from the prefix cache because requests needed them.
    """

    __slots__ = ("_allocator", "_cache", "_moved", "_pool", "_states", "evicted_pages_total", "page_size")

    def __init__(
        self, allocator: PageAllocator, pool: ReqToTokenPool, states: RowStates, prefix_cache: PrefixCache
    ) -> None:
        self._allocator = allocator
        self._pool = pool
        self._states = states
        self._cache = prefix_cache
        self.page_size = pool.page_size
        self.evicted_pages_total = 0
        self._moved: dict[
            int, tuple[int, int]
        ] = {}  # row -> (first, last + 1) page index that got other pages

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self._allocator.num_pages

    @property
    def free_pages(self) -> int:
        """Pages that nobody owns."""
        return self._allocator.num_free

    @property
    def cached_pages(self) -> int:
        """Pages the prefix cache owns, leased or not."""
        return self._cache.evictable_pages + self._cache.locked_pages

    @property
    def available_pages(self) -> int:
        """Pages that can be had without taking them from a request: free ones and evictable ones."""
        return self._allocator.num_free + self._cache.evictable_pages

    @property
    def held_pages(self) -> int:
        """Pages that requests own, counted from the page tables and not as the rest of the others."""
        return int(self._pool.num_pages.sum()) - int(self._pool.num_leased.sum())

    # ------------------------------------------------------------ beginning of a request

    def match(self, req: Req) -> PrefixMatch:
        """The cached prefix of a waiting request: at most all but its last token, which must be computed to sample.

        Remembered until the cache changes, so that a queue that cannot move costs nothing in each step.
        """
        if req.sampling.prompt_logprobs is not None and not req.answered:
            return (
                _NO_MATCH  # log-probabilities of the prompt need its logits, so all of it has to be computed
            )
        if req.match is None or req.match_generation != self._cache.generation:
            max_pages = (req.fill_len - 1) // self.page_size
            req.match = self._cache.match(req.extra_key, req.fill_ids, max_pages)
            req.match_generation = self._cache.generation
        return req.match

    def unlocked_pages(self, match: PrefixMatch) -> int:
        """Pages that stop being available when this match is locked."""
        return self._cache.unlocked_pages(match)

    def lock(self, req: Req, match: PrefixMatch) -> None:
        """Lease the match for a request that is being admitted; from now on nobody can evict it."""
        req.lease = self._cache.lock(req.extra_key, match)
        req.match = None

    def open_row(self, req: Req) -> None:
        """Put the leased pages into the request's (empty) row."""
        assert req.lease is not None
        if req.lease.num_pages:
            self._pool.append_pages(req.row, self._cache.pages_of(req.lease))
        self._pool.num_leased[req.row] = req.lease.num_pages

    # ------------------------------------------------------------ growth

    def grow(self, row: int, num_tokens: int) -> None:
        """Give a row pages for `num_tokens` tokens in all, evicting where needed. The caller made sure they exist."""
        missing = pages_for(num_tokens, self.page_size) - int(self._pool.num_pages[row])
        if missing > 0:
            self._pool.append_pages(row, self._take(missing))

    def rows_without_room(self, rows: IntArray) -> IntArray:
        """Those of `rows` whose next token needs a new page."""
        full = self._states.num_computed[rows] >= self._pool.num_pages[rows] * np.int32(self.page_size)
        result: IntArray = rows[full]
        return result

    def grow_by_a_page(self, rows: IntArray) -> None:
        """Give each row one more page."""
        if rows.size:
            num_pages = self._pool.num_pages[rows]
            self._pool.pages[rows, num_pages] = self._take(int(rows.size))
            self._pool.num_pages[rows] = num_pages + 1

    def _take(self, count: int) -> IntArray:
        missing = count - self._allocator.num_free
        if missing > 0:
            evicted = self._cache.evict(missing)
            self.evicted_pages_total += len(evicted)
            self._allocator.free(evicted)
        return self._allocator.allocate(count)

    # ------------------------------------------------------------ into the prefix cache, and the end

    def cache_settled(self, req: Req) -> None:
        """Offer the computed whole pages of a running request to the cache, so that others can share them already.

        Where the cache has the same tokens already, the request goes on with the cache's pages and its own copies are
        free; the runner learns it from a `RowUpdate` in the next plan.
        """
        assert req.lease is not None
        row, first = req.row, req.lease.num_pages
        end = int(self._states.num_settled[row]) // self.page_size
        if end <= first:
            return
        token_ids = self._states.token_ids[row, first * self.page_size : end * self.page_size].tobytes()
        own = self._pool.pages[row, first:end]
        cached = self._cache.extend(req.lease, token_ids, own)
        if not cached.size:
            return
        different = np.flatnonzero(cached != own)
        if different.size:
            changed_from, changed_to = first + int(different[0]), first + int(different[-1]) + 1
            begin, _ = self._moved.get(row, (changed_from, 0))  # a lease grows at its end only
            self._moved[row] = (begin, changed_to)
            self._allocator.free(own[different])
            own[:] = cached
        self._pool.num_leased[row] = end

    def release(self, req: Req, *, keep: bool) -> None:
        """End a request's hold on its row and pages.

        Args:
            keep: offer what it computed to the prefix cache. True for whoever finished, was aborted, or was retracted:
                its pages are then evictable, which is as good as free, and if nobody needs them the work is not lost.
                False where the KV itself may be bad: then what earlier steps have put into the cache goes, too, unless
                others use it, who are judged by their own results.
        """
        assert req.lease is not None
        row = req.row
        if keep:
            self.cache_settled(req)
        begin, end = req.lease.num_pages, int(self._pool.num_pages[row])
        self._allocator.free(self._pool.pages[row, begin:end])
        if keep:
            self._cache.release(req.lease)
        else:
            self._allocator.free(self._cache.forget(req.lease))
        req.lease = None
        self._moved.pop(row, None)
        self._pool.release(row)
        req.row = -1

    def take_moved(self) -> list[tuple[int, int, int]]:
        """(row, first position, end position) of slots that changed since the last call, for `RowUpdate`."""
        moved, self._moved = self._moved, {}
        return [(row, begin * self.page_size, end * self.page_size) for row, (begin, end) in moved.items()]

    def flush(self) -> tuple[int, int]:
        """Empty the prefix cache of all that is not leased; returns (pages dropped, pages kept)."""
        dropped = self._cache.evict(self._cache.evictable_pages)
        self._allocator.free(dropped)
        return len(dropped), self._cache.locked_pages
