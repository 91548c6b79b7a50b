"""`KVMemory`: every page of KV memory changes hands here, between the free pages, the prefix cache and the requests.

It composes the supply of pages, the page tables and the prefix cache, and keeps their one invariant: a page has exactly
one owner (see `ledger.py`). Requests own the pages of their row beyond their lease.

Why pages can be given back while a step in flight still uses them: the runner executes steps strictly in the order of
their launch, and whoever gets a page next uses it in a step that is planned, hence launched, later. So a late write
of an old step always lands before the new owner's first write, and a late read before it too. What must never happen
is that such a page is in the prefix cache when the late write comes; therefore only KV that settled steps have made
is offered to the cache (`RowStates.num_settled`), and a step in flight writes behind that.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Sequence
from typing import Final

import numpy as np

from ...runtime.feasibility import pages_for
from ..arrays import IntArray
from ..prefix_cache.base import Prefix, PrefixCache, PrefixMatch
from ..records.cache_miss import CacheMiss, MissKind
from ..records.decision_log import PageCounts
from ..requests.req import Req, ReqStatus
from ..requests.row_states import RowStates
from .page_supply import PageSupply
from .req_to_token_pool import ReqToTokenPool
from .swap_pool import SwapPool

MAX_LOOKUPS: Final = 16
"""Prefixes that an order of the queue may look up again in one pass."""

_NO_MATCH = PrefixMatch()
_MATCH_GENERATION: Final = operator.attrgetter("match_generation")


class KVMemory:
    """Pages for rows."""

    __slots__ = (
        "_cache",
        "_copies",
        "_host",
        "_lookahead",
        "_misses",
        "_moved",
        "_pool",
        "_states",
        "_supply",
        "page_size",
    )

    def __init__(
        self,
        supply: PageSupply,
        pool: ReqToTokenPool,
        states: RowStates,
        prefix_cache: PrefixCache,
        host: SwapPool,
        *,
        num_lookahead_tokens: int = 0,
    ) -> None:
        """`num_lookahead_tokens`: slots that are kept ready beyond each request's next token, for draft tokens."""
        self._host = host
        self._lookahead = np.int32(num_lookahead_tokens)
        self._copies: list[tuple[int, int]] = []
        self._misses: list[CacheMiss] = []
        self._supply = supply
        self._pool = pool
        self._states = states
        self._cache = prefix_cache
        self.page_size = pool.page_size
        # row -> (first, last + 1) index of the pages that were exchanged for the cache's
        self._moved: dict[int, tuple[int, int]] = {}

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self._supply.num_pages

    @property
    def cached_pages(self) -> int:
        """Pages the prefix cache owns, leased or not."""
        return self._cache.evictable_pages + self._cache.locked_pages

    @property
    def available_pages(self) -> int:
        """Pages that can be had without taking them from a request: free ones and evictable ones."""
        return self._supply.num_available

    @property
    def evicted_pages_total(self) -> int:
        """Pages taken from the prefix cache because requests needed them, or will soon."""
        return self._supply.evicted_total

    @property
    def held_pages(self) -> int:
        """Pages that requests own, counted from the page tables and not as the rest of the others."""
        return int(self._pool.num_pages.sum()) - int(self._pool.num_leased.sum())

    @property
    def highest_used_page(self) -> int:
        """The highest page id that anybody ever had; 0 if nobody had one."""
        return self._supply.highest_used

    def page_counts(self) -> PageCounts:
        """The terms of the page equation; what requests hold is what the others leave."""
        free, evictable, locked = self._supply.num_free, self._cache.evictable_pages, self._cache.locked_pages
        return PageCounts(free, evictable, locked, self._supply.num_pages - free - evictable - locked)

    # ------------------------------------------------------------ beginning of a request

    @property
    def shares_prefixes(self) -> bool:
        """Whether what one request has computed can be found by others."""
        return self._cache.shares

    def match(self, req: Req) -> PrefixMatch:
        """The cached prefix of a waiting request: at most all but its last token, which must be computed to sample.

        Remembered until the cache changes, so that a queue that cannot move costs nothing in each step.
        """
        if _needs_prompt_logits(req):
            return _NO_MATCH
        if req.match is None or req.match_generation != self._cache.generation:
            max_pages = (req.fill_len - 1) // self.page_size
            req.match = self._cache.match(req.extra_key, req.fill_ids, max_pages)
            req.match_generation = self._cache.generation
        return req.match

    def known_matches(self, reqs: Sequence[Req]) -> list[PrefixMatch]:
        """The cached prefixes of waiting requests, good enough to order them by.

        Exact for those that were never looked up. The cache changes in nearly every step, and to look up 120 prompts of
        16,000 tokens again takes 12 ms, so the others' are brought up to date in turns, `MAX_LOOKUPS` in each call.
        Whoever is offered is looked up anyway, see `prefix`.
        """
        generation = self._cache.generation
        stale = [req for req in reqs if req.match is not None and req.match_generation != generation]
        for req in heapq.nsmallest(MAX_LOOKUPS, stale, key=_MATCH_GENERATION):
            self.match(req)
        return [self.match(req) if req.match is None else req.match for req in reqs]

    def prefix(self, req: Req, sibling: Req | None) -> Prefix:
        """What a waiting request could start with: the cache's pages, then the host's, or those of a sibling.

        Args:
            sibling: a request with a row and the same prompt, all of which has been computed.
        """
        match = self.match(req)
        ready_len = match.num_pages * self.page_size
        if req.host_pages is not None:
            ready_len = max(ready_len, req.host_len)
        elif sibling is not None and self._lacks_one_page(req, match):
            ready_len = req.prompt_len - 1
        return Prefix(match, ready_len)

    def _lacks_one_page(self, req: Req, match: PrefixMatch) -> bool:
        """Whether a new request lacks of its prompt, but for the last token, what stands in one page of a sibling's."""
        if _needs_prompt_logits(req):
            return False
        whole, rest = divmod(req.prompt_len - 1, self.page_size)
        return rest > 0 and req.output_len == 0 and match.num_pages == whole

    def unlocked_pages(self, match: PrefixMatch) -> int:
        """Pages that stop being available when this match is locked."""
        return self._cache.unlocked_pages(match)

    def lock(self, req: Req, match: PrefixMatch) -> None:
        """Lease the match for a request that is being admitted; from now on nobody can evict it."""
        if req.status is ReqStatus.WAITING:
            self._misses.append(self._explain(req, match))
        req.lease = self._cache.lock(req.extra_key, match, req.priority)
        req.match = None

    def _explain(self, req: Req, match: PrefixMatch) -> CacheMiss:
        if req.sampling.prompt_logprobs is not None:
            return CacheMiss(req.rid, req.prompt_len, 0, MissKind.BYPASSED, 0)
        return self._cache.explain(req.extra_key, req.fill_ids, match, req.rid)

    def take_misses(self) -> list[CacheMiss]:
        """Why those admitted since the last call did not find more of their prompts cached; for the decision log."""
        misses, self._misses = self._misses, []
        return misses

    def open_row(self, req: Req) -> None:
        """Put the leased pages into the request's (empty) row."""
        assert req.lease is not None
        if req.lease.num_pages:
            self._pool.append_pages(req.row, self._cache.pages_of(req.lease))
        self._pool.num_leased[req.row] = req.lease.num_pages

    def restore(self, req: Req, ready_len: int, sibling: Req | None) -> None:
        """Fill a row's first own pages with KV that exists elsewhere. Call after `grow`.

        From the host, or (`sibling`) as a copy of the page that is only half the prompt's: the sibling writes its own
        tokens behind the prompt into it, so each needs one of its own.
        """
        assert req.lease is not None
        first = req.lease.num_pages
        if req.host_pages is not None:
            end = pages_for(ready_len, self.page_size)
            self._host.swap_in(req.host_pages[first:end], self._pool.pages[req.row, first:end].copy())
            self.drop_host_pages(req)
        elif sibling is not None and ready_len > first * self.page_size:
            source, target = self._pool.pages[sibling.row, first], self._pool.pages[req.row, first]
            self._copies.append((int(source), int(target)))

    def drop_host_pages(self, req: Req) -> None:
        """A swapped request has come back, or ended: its pages on the host are free."""
        assert req.host_pages is not None
        self._host.free(req.host_pages)
        req.host_pages = None
        req.host_len = 0

    # ------------------------------------------------------------ growth

    def grow(self, row: int, num_tokens: int) -> None:
        """Give a row pages for `num_tokens` tokens in all, evicting where needed. The caller made sure they exist."""
        num_pages = int(self._pool.num_pages[row])
        missing = pages_for(num_tokens, self.page_size) - num_pages
        if missing <= 0:
            return
        after = int(self._pool.pages[row, num_pages - 1]) if num_pages else 0
        self._pool.append_pages(row, self._supply.take(missing, after))

    def rows_without_room(self, rows: IntArray) -> IntArray:
        """Those of `rows` that need a new page, one entry per page, so that their next token has a slot.

        With lookahead slots, those of the draft tokens, too, as far as the request can ever use them.
        """
        needed = self._states.num_computed[rows] + np.int32(1)
        if self._lookahead:
            needed = np.maximum(needed, np.minimum(needed + self._lookahead, self._states.max_kv_len[rows]))
        page_size = np.int32(self.page_size)
        missing = -(-needed // page_size) - self._pool.num_pages[rows]
        result: IntArray = (
            rows[missing > 0] if not self._lookahead else np.repeat(rows, np.maximum(missing, 0))
        )
        return result

    def grow_by_a_page(self, rows: IntArray) -> None:
        """Give each row one more page for each time it is named; equal ones stand together."""
        if not rows.size:
            return
        num_pages = self._pool.num_pages[rows]
        after = self._pool.pages[rows, num_pages - 1]
        if self._lookahead:
            first = np.concatenate([[0], np.flatnonzero(np.diff(rows)) + 1])
            before = np.arange(len(rows), dtype=np.int32) - np.repeat(
                first, np.diff(np.append(first, len(rows)))
            ).astype(np.int32)
            num_pages += before
            after[before > 0] = 0
        self._pool.pages[rows, num_pages] = self._supply.take_after(after)
        self._pool.num_pages[rows] = num_pages + 1

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
            self._supply.give_back(own[different])
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
        self._supply.give_back(self._pool.pages[row, begin:end])
        if keep:
            self._cache.release(req.lease)
        else:
            self._supply.give_back(self._cache.forget(req.lease))
        req.lease = None
        self._moved.pop(row, None)
        self._pool.release(row)
        req.row = -1

    def swap_out(self, req: Req) -> None:
        """Plan to copy what settled steps have computed of a running request to the host. Call before `release`.

        The caller has seen to it that there are such tokens, and room on the host for `num_swappable_pages`.
        """
        num_pages = self.num_swappable_pages(req)
        req.host_pages = self._host.swap_out(self._pool.pages[req.row, :num_pages].copy())
        req.host_len = int(self._states.num_settled[req.row])

    def num_own_pages(self, req: Req) -> int:
        """Pages of a running request that come free when it leaves, because nobody else has them."""
        return int(self._pool.num_pages[req.row] - self._pool.num_leased[req.row])

    def num_swappable_pages(self, req: Req) -> int:
        """Pages that `swap_out` would copy."""
        return pages_for(int(self._states.num_settled[req.row]), self.page_size)

    def take_copies(self) -> bytes:
        """[C, 2] (source page, destination page) since the last call, int32 bytes, for `StepPlan.page_copies`."""
        copies, self._copies = self._copies, []
        return np.array(copies, dtype=np.int32).tobytes() if copies else b""

    def take_moved(self) -> list[tuple[int, int, int]]:
        """(row, first position, end position) of slots that changed since the last call, for `RowUpdate`."""
        moved, self._moved = self._moved, {}
        return [(row, begin * self.page_size, end * self.page_size) for row, (begin, end) in moved.items()]

    @property
    def pinned_pages(self) -> int:
        """Pages that go last when others need room."""
        return self._cache.pinned_pages

    @property
    def num_pins(self) -> int:
        """How many pins there are."""
        return self._cache.num_pins

    def pin(self, extra_key: str, token_ids: bytes, until_s: float | None) -> int:
        """Pin what is cached of a prefix until a time, or (None) end the pin; the number of pages pinned."""
        if until_s is None:
            self._cache.unpin(extra_key, token_ids)
            return 0
        return self._cache.pin(extra_key, token_ids, until_s)

    def expire_pins(self, now_s: float) -> None:
        """End the pins whose time is over."""
        self._cache.expire_pins(now_s)

    def flush(self) -> tuple[int, int]:
        """Empty the prefix cache of all that is not leased; returns (pages dropped, pages kept)."""
        dropped = self._cache.flush()
        self._supply.give_back(dropped)
        return len(dropped), self._cache.locked_pages


def _needs_prompt_logits(req: Req) -> bool:
    """Log-probabilities of a prompt need its logits, so all of it has to be computed until they are sent."""
    return req.sampling.prompt_logprobs is not None and not req.answered
