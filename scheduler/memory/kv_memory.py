"""`KVMemory`: moves pages of KV memory between their owners: free, the prefix cache, or one request.

It combines the page supply, the page tables and the prefix cache, and keeps their invariant: a page has exactly one
owner (see `ledger.py`). A request owns the pages of its row after its lease. The KV of one running request:

    tokens    0                 prefix_len          num_settled       num_computed        fill_len      max_kv_len
              |  cached prefix      |  computed         |  in flight       |  rest of the    |  output      |
              |  (leased)           |                   |                  |  prompt          |              |
    pages     |  owned by the       |  owned by the request, in its row    |  none yet: reserved by          |
              |  prefix cache,      |  whole computed pages are offered    |  `PrefillBudget` and            |
              |  locked             |  to the cache by `settle`            |  `OutputEstimator`              |

Pages may be freed while a step in flight still uses them. A freed page is reused only by steps launched later, and the
runner executes steps in launch order. So all reads and writes of the old step come before the first write of the new
owner. A page in the prefix cache must not be written any more. So only KV of settled steps (`RowStates.num_settled`) is
offered to the cache; a step in flight writes only to positions after it.
"""

from __future__ import annotations

import heapq
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...runtime.feasibility import pages_for
from ...runtime.messages import GenerateRequest
from ...runtime.scheduler_report import HistogramCounts
from ..arrays import TOKEN_ID_BYTES, AnyIntArray, IntArray
from ..prefix_cache.base import Lease, Prefix, PrefixCache, PrefixMatch, Session
from ..prefix_cache.tier_pages import page_keys, root_key
from ..records.decision_log import PageCounts
from ..records.verdict import CacheMiss, MissKind
from ..requests.req import Req, ReqStatus
from ..requests.row_states import RowStates
from .host_pages import HostPages
from .label_groups import LabelGroups
from .pages import PageSupply
from .req_to_token_pool import ReqToTokenPool
from .state_slots import StateSlots

MAX_LOOKUPS: Final = 16
"""The most prefixes that ordering the queue looks up again in one pass."""

_NO_MATCH = PrefixMatch()
_QUEUED: Final = frozenset({ReqStatus.WAITING, ReqStatus.RETRACTED})
_MATCH_GENERATION: Final = operator.attrgetter("match_generation")


class KVMemory:
    """Gives pages to rows and takes them back.

    Attributes:
        label_groups: of the requests for probabilities of labels, by the beginning of their prompts.
        session_turns: turns of sessions that were admitted, but for the first of each, by what they found: all of an
            earlier turn ("hit"), or not because it was "evicted", or because they begin otherwise ("rewritten").
    """

    def __init__(
        self,
        supply: PageSupply,
        pool: ReqToTokenPool,
        states: RowStates,
        prefix_cache: PrefixCache,
        host: HostPages,
        *,
        num_lookahead_tokens: int = 0,
        state_slots: StateSlots | None = None,
    ) -> None:
        """Take the parts.

        Args:
            num_lookahead_tokens: slots that each request has after its next token's slot, for draft tokens.
            state_slots: of a model with state layers; None: it has none.
        """
        self.state_slots = state_slots if state_slots is not None else StateSlots()
        self._has_states = state_slots is not None
        self._host = host
        self._lookahead = np.int32(num_lookahead_tokens)
        self._copies: list[tuple[int, int]] = []
        self._host_hits: dict[
            Req, list[bytes]
        ] = {}  # admitted in this pass: keys of the pages to copy from the host
        self._misses: list[CacheMiss] = []
        self.session_turns = Counter[str]()
        self._supply = supply
        self._pool = pool
        self._states = states
        self._cache = prefix_cache
        self.page_size = pool.page_size
        # row -> (first, last + 1) index of the pages that were replaced by pages of the cache
        self._moved: dict[int, tuple[int, int]] = {}
        self.label_groups = LabelGroups(prefix_cache, pool.page_size)

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self._supply.num_pages

    @property
    def cached_pages(self) -> int:
        """Pages that the prefix cache owns, leased or not."""
        return self._cache.evictable_pages + self._cache.locked_pages

    @property
    def available_pages(self) -> int:
        """Pages that can be allocated without a retraction: free pages and evictable pages."""
        return self._supply.num_available

    @property
    def evicted_pages_total(self) -> int:
        """Pages evicted from the prefix cache so far."""
        return self._supply.evicted_total

    @property
    def held_pages(self) -> int:
        """Pages that requests own, counted in the page tables, independent of the other counters."""
        return int(self._pool.num_pages.sum()) - int(self._pool.num_leased.sum())

    @property
    def highest_used_page(self) -> int:
        """The highest page id that was ever allocated; 0 if none was."""
        return self._supply.highest_used

    def page_counts(self) -> PageCounts:
        """The terms of the page equation; `held` is computed as the total minus the other terms."""
        free, evictable, locked = self._supply.num_free, self._cache.evictable_pages, self._cache.locked_pages
        return PageCounts(free, evictable, locked, self._supply.num_pages - free - evictable - locked)

    # ------------------------------------------------------------ beginning of a request

    def begin_turn(self, message: GenerateRequest, now_s: float) -> Session | None:
        """Count an arriving request in its session; None: it names none. One that goes on after a crash counts, too."""
        if not message.session:
            return None
        return self._cache.begin_turn(message.session, message.tenant, message.group, now_s)

    @property
    def shares_prefixes(self) -> bool:
        """Whether requests can share computed prefixes."""
        return self._cache.shares

    def match(self, req: Req) -> PrefixMatch:
        """The cached prefix of a waiting request. It never includes the last token, which is computed to sample.

        The result is kept in the request until the cache changes, so a blocked queue costs no look-ups.
        """
        max_pages = req.most_cached // self.page_size
        if req.needs_all_tokens and not max_pages:
            return _NO_MATCH
        if req.match is None or req.match_generation != self._cache.generation:
            match = self._cache.match(req.extra_key, req.fill_ids, max_pages)
            while (whole := self._whole_pages(req, match.num_pages)) < match.num_pages:
                match = self._cache.match(req.extra_key, req.fill_ids, whole)
            req.match = match
            req.match_generation = self._cache.generation
            if req.status in _QUEUED:
                num_missing = req.fill_len - req.match.num_pages * self.page_size
                self._cache.want(req.seq, req.match, num_missing)
        return req.match

    def enqueued(self, req: Req) -> None:
        """A request joined the queue: from now on its cached prefix is evicted after others.

        Of the background only the next one keeps its prefix, which is looked up when it is offered.
        """
        if req.shared_len and not req.background:
            self.label_groups.joined(req)
        if self._cache.counts_wants and not req.background:
            self.match(req)

    def dequeued(self, req: Req) -> None:
        """A request left the queue."""
        self._cache.unwant(req.seq)

    def ended(self, req: Req) -> None:
        """A request has ended, with a row before or without one."""
        if req.shared_len:
            self.label_groups.left(req)

    def known_matches(self, reqs: Sequence[Req]) -> list[PrefixMatch]:
        """The cached prefixes of waiting requests, for ordering the queue; some may be out of date.

        Requests without a match are looked up. The cache changes in nearly every step, and looking up 120 prompts of
        16,000 tokens again takes 12 ms. So each call updates only the `MAX_LOOKUPS` oldest of the known matches. For
        admission, `prefix` looks up the request again if its match is out of date.
        """
        generation = self._cache.generation
        stale = [req for req in reqs if req.match is not None and req.match_generation != generation]
        for req in heapq.nsmallest(MAX_LOOKUPS, stale, key=_MATCH_GENERATION):
            self.match(req)
        return [self.match(req) if req.match is None else req.match for req in reqs]

    def prefix(self, req: Req, sibling: Req | None) -> Prefix:
        """The KV that a waiting request can start with: the cache's, and that of the host or of a sibling.

        Args:
            req: the waiting request.
            sibling: a parallel sample with a row; all of their common prompt has been computed.
        """
        match = self.match(req)
        ready_len = match.num_pages * self.page_size
        if req.host_pages is not None:
            if req.host_len <= ready_len:
                return Prefix(match, ready_len)
            return Prefix(match, req.host_len, pages_for(req.host_len, self.page_size) - match.num_pages)
        if sibling is not None and self._lacks_one_page(req, match):
            return Prefix(match, req.prompt_len - 1)
        num_host_pages = self._num_on_host(req, match)
        return Prefix(match, ready_len + num_host_pages * self.page_size, num_host_pages)

    def num_ready_pages(self, req: Req) -> int:
        """Whole pages of a waiting request that need not be computed: of the cache, and after them of the host."""
        match = self.match(req)
        return match.num_pages + self._num_on_host(req, match)

    def _num_on_host(self, req: Req, match: PrefixMatch) -> int:
        """Pages after a match that the host has."""
        max_pages = req.most_cached // self.page_size
        if not self._host.num_cached or match.num_pages >= max_pages:
            return 0
        found = self._host.count_cached(self._page_keys(req, max_pages)[match.num_pages :])
        return self._whole_pages(req, match.num_pages + found) - match.num_pages

    def _whole_pages(self, req: Req, num_pages: int) -> int:
        """The most of the first pages of a request that do not end within an image that is used whole or not at all."""
        return req.last_cut(num_pages * self.page_size, self.page_size) // self.page_size

    def _page_keys(self, req: Req, num_pages: int) -> list[bytes]:
        """The keys of the first pages of a request, which keeps them."""
        num_known, page_bytes = len(req.page_keys), self.page_size * TOKEN_ID_BYTES
        if num_known < num_pages:
            last = req.page_keys[-1] if num_known else root_key(b"", req.extra_key)
            token_ids = req.fill_ids[num_known * page_bytes : num_pages * page_bytes]
            req.page_keys += page_keys(last, token_ids, self.page_size)
        return req.page_keys[:num_pages]

    def _lacks_one_page(self, req: Req, match: PrefixMatch) -> bool:
        """Whether the rest of a new request's prompt, without the last token, is within one page of a sibling."""
        if req.needs_all_tokens or self._has_states:  # a sibling's state is not that of the prompt any more
            return False
        if req.last_cut(req.prompt_len - 1, 1) < req.prompt_len - 1:
            return False
        whole, rest = divmod(req.prompt_len - 1, self.page_size)
        return rest > 0 and req.output_len == 0 and match.num_pages == whole

    def unlocked_pages(self, match: PrefixMatch) -> int:
        """Number of available pages that locking this match takes."""
        return self._cache.unlocked_pages(match)

    def lock(self, req: Req, prefix: Prefix) -> None:
        """Lease the match for a request that is being admitted; leased pages cannot be evicted.

        Pages of the host stay there, too, until `restore` has planned their copies.
        """
        match, num_host_pages = prefix.match, prefix.num_host_pages
        if num_host_pages and req.host_pages is None:
            keys = self._page_keys(req, match.num_pages + num_host_pages)[match.num_pages :]
            self._host_hits[req] = keys
            self._host.admit(num_host_pages, keys)
        else:
            self._host.admit(num_host_pages)
        if req.status is ReqStatus.WAITING:
            req.host_tokens = num_host_pages * self.page_size
            miss = self._explain(req, match)._replace(host_tokens=req.host_tokens)
            self._misses.append(miss)
            self._host.lookups_total += 1
            if req.session is not None and req.turn > 1:
                self.session_turns[self._outcome(req.session, match, miss.kind)] += 1
        req.checkpoint, req.tree_len = match.checkpoint, match.num_known * self.page_size
        req.lease = self._cache.lock(
            req.extra_key, match, req.priority, in_memory=req.in_memory, background=req.background
        )
        req.match = None

    def _outcome(self, session: Session, match: PrefixMatch, kind: MissKind) -> str:
        """The part of earlier turns that a later turn of a session found, as in `session_turns`."""
        if kind in (MissKind.EVICTED, MissKind.FLUSHED, MissKind.NO_STATE):
            return "evicted"
        return "hit" if self._cache.continues(session, match) else "rewritten"

    def _explain(self, req: Req, match: PrefixMatch) -> CacheMiss:
        if match is _NO_MATCH:
            return CacheMiss(req.rid, req.prompt_len, 0, MissKind.BYPASSED, 0)
        return self._cache.explain(req.extra_key, req.fill_ids, match, req.rid)

    def take_misses(self) -> list[CacheMiss]:
        """One `CacheMiss` for each request admitted since the last call; for the decision log."""
        misses, self._misses = self._misses, []
        return misses

    def open_row(self, req: Req) -> None:
        """Put the leased pages into the request's row, which is empty."""
        assert req.lease is not None
        if req.lease.num_pages:
            self._pool.append_pages(req.row, self._cache.pages_of(req.lease))
        self._pool.num_leased[req.row] = req.lease.num_pages

    def restore(self, req: Req, ready_len: int, sibling: Req | None) -> None:
        """Plan the copies that fill a row's first own pages with existing KV. Call after `grow`.

        The source is the host, or the page in which the prompt of the sibling ends. That page cannot be shared: each
        sample writes its output after the prompt into it.
        """
        assert req.lease is not None
        first = req.lease.num_pages
        if req.host_pages is not None:
            end = pages_for(ready_len, self.page_size)
            self._host.swap_in(req.host_pages[first:end], self._pool.pages[req.row, first:end].copy())
            self.drop_host_pages(req)
        elif keys := self._host_hits.pop(req, None):
            self._host.copy_in(keys, self._pool.pages[req.row, first : first + len(keys)].copy())
        elif sibling is not None and ready_len > first * self.page_size:
            source, target = self._pool.pages[sibling.row, first], self._pool.pages[req.row, first]
            self._copies.append((int(source), int(target)))

    def drop_host_pages(self, req: Req) -> None:
        """Free the host pages of a swapped request that has returned or ended."""
        assert req.host_pages is not None
        self._host.free(req.host_pages)
        req.host_pages = None
        req.host_len = 0

    # ------------------------------------------------------------ growth

    def grow(self, row: int, num_tokens: int) -> None:
        """Give a row pages for `num_tokens` tokens in all; evict if needed. The caller checks `available_pages`."""
        num_pages = int(self._pool.num_pages[row])
        missing = pages_for(num_tokens, self.page_size) - num_pages
        if missing <= 0:
            return
        self._pool.append_pages(row, self._supply.take(missing))

    def rows_without_room(self, rows: IntArray) -> IntArray:
        """The entries of `rows` that need new pages for their next token; one entry per page.

        With look-ahead slots, a row also needs pages for draft tokens, up to its `max_kv_len`.
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
        """Give each entry of `rows` one page. A row may have several entries, which are neighbors."""
        if not rows.size:
            return
        num_pages = self._pool.num_pages[rows]
        if self._lookahead:
            first = np.concatenate([[0], np.flatnonzero(np.diff(rows)) + 1])
            before = np.arange(len(rows), dtype=np.int32) - np.repeat(
                first, np.diff(np.append(first, len(rows)))
            ).astype(np.int32)
            num_pages += before
        self._pool.pages[rows, num_pages] = self._supply.take(len(rows))
        self._pool.num_pages[rows] = num_pages + 1

    # ------------------------------------------------------------ into the prefix cache, and the end

    def cache_settled(self, req: Req) -> None:
        """Offer the settled whole pages of a running request to the cache, so that others can share them at once.

        Where the cache already has the same tokens, the request goes on with the cache's pages and its copies are
        freed. A `RowUpdate` in the next plan notifies the runner.
        """
        assert req.lease is not None
        row, first = req.row, req.lease.num_pages
        end = int(self._states.num_settled[row]) // self.page_size
        if end > first:
            self._extend_lease(req.lease, row, first, end)
        for position, checkpoint in self.state_slots.take_due(row, int(self._states.num_settled[row])):
            num_pages = position // self.page_size
            if num_pages > req.lease.num_pages or not self._cache.keep_state(
                req.lease, num_pages, checkpoint
            ):
                self.state_slots.free(checkpoint)

    def settle_states(self, reqs: Iterable[Req]) -> None:
        """Give the cache the checkpoints of running requests that are settled; `reqs`: those of a settled step."""
        due = self.state_slots.rows_with_due(self._states.num_settled)
        if due:
            for req in reqs:
                if req.row in due:
                    self.cache_settled(req)

    def _extend_lease(self, lease: Lease, row: int, first: int, end: int) -> None:
        """Offer the pages `first`..`end`-1 of a row to the cache."""
        token_ids = self._states.token_ids[row, first * self.page_size : end * self.page_size].tobytes()
        own = self._pool.pages[row, first:end]
        cached = self._cache.extend(lease, token_ids, own)
        if cached.size:
            self._use_cached(row, first, own, cached)
            self._pool.num_leased[row] = end

    def _use_cached(self, row: int, first: int, own: IntArray, cached: AnyIntArray) -> None:
        """Replace a row's own pages, from index `first` on, by those of the cache where they differ."""
        different = np.flatnonzero(cached != own)
        if different.size:
            changed_from, changed_to = first + int(different[0]), first + int(different[-1]) + 1
            begin, _ = self._moved.get(row, (changed_from, 0))  # a lease grows at its end only
            self._moved[row] = (begin, changed_to)
            self._supply.give_back(own[different])
            own[:] = cached

    def release(self, req: Req, *, keep: bool) -> None:
        """Free the row and the pages of a request.

        Args:
            req: a request with a row.
            keep: offer its settled pages to the prefix cache. True if it finished, was aborted or was retracted: its
                pages become evictable, so they are available, and the KV can be reused until it is evicted.
                False if the KV may be bad: then the pages that earlier steps put into the cache are removed, too,
                except those that other requests use. The results of those requests show whether their KV is bad.
        """
        assert req.lease is not None
        row = req.row
        if keep:
            self.cache_settled(req)
        self.state_slots.drop_planned(row)
        begin, end = req.lease.num_pages, int(self._pool.num_pages[row])
        self._supply.give_back(self._pool.pages[row, begin:end])
        if keep:
            once = req.pooling is not None or req.keep_s == 0 or req.background
            self._cache.release(req.lease, once=once, session=req.session)
            if req.shared_len:
                self.label_groups.computed(req)
        else:
            self._supply.give_back(self._cache.forget(req.lease))
            if self._host.num_cached:
                self._host.forget(self._page_keys(req, req.fill_len // self.page_size))
        req.lease = None
        self._moved.pop(row, None)
        self._pool.release(row)
        req.row = -1

    def swap_out(self, req: Req) -> None:
        """Plan to copy the settled KV of a running request to the host. Call before `release`.

        The caller has checked that there is settled KV, and that the host has `num_swappable_pages` free pages.
        """
        num_pages = self.num_swappable_pages(req)
        req.host_pages = self._host.swap_out(self._pool.pages[req.row, :num_pages].copy())
        req.host_len = int(self._states.num_settled[req.row])

    def num_own_pages(self, req: Req) -> int:
        """Pages that a running request owns; they become free when it leaves its row."""
        return int(self._pool.num_pages[req.row] - self._pool.num_leased[req.row])

    def num_swappable_pages(self, req: Req) -> int:
        """Pages that `swap_out` would copy."""
        return pages_for(int(self._states.num_settled[req.row]), self.page_size)

    def take_copies(self) -> bytes:
        """[C, 2] int32 bytes, (source page, destination page) planned since the last call: `StepPlan.page_copies`."""
        copies, self._copies = self._copies, []
        return np.array(copies, dtype=np.int32).tobytes() if copies else b""

    def take_moved(self) -> list[tuple[int, int, int]]:
        """(row, first position, end position) of slots that changed since the last call, for `RowUpdate`."""
        moved, self._moved = self._moved, {}
        return [(row, begin * self.page_size, end * self.page_size) for row, (begin, end) in moved.items()]

    @property
    def pinned_pages(self) -> int:
        """Pages under a pin; they are evicted after all others."""
        return self._cache.pinned_pages

    @property
    def num_pins(self) -> int:
        """Number of pins."""
        return self._cache.num_pins

    def pin(self, extra_key: str, token_ids: bytes, until_s: float | None) -> int:
        """Pin the cached part of a prefix until a time; return the number of pinned pages. None ends the pin."""
        if until_s is None:
            self._cache.unpin(extra_key, token_ids)
            return 0
        return self._cache.pin(extra_key, token_ids, until_s)

    def keep_prompt(self, req: Req, now_s: float) -> None:
        """Keep the cached prompt of a request that has left its row for the time that it asks for, within the quota."""
        if req.keep_s and not (req.session is not None and req.session.closed):
            prompt_ids = req.fill_ids[: req.prompt_len * TOKEN_ID_BYTES]
            self._cache.pin(req.extra_key, prompt_ids, now_s + req.keep_s, req.tenant)

    def expire_pins(self, now_s: float) -> None:
        """End expired pins."""
        self._cache.expire_pins(now_s)

    @property
    def num_sessions(self) -> int:
        """Sessions that are kept."""
        return self._cache.num_sessions

    def residency(self) -> dict[str, HistogramCounts]:
        """See `PrefixCache.residency`."""
        return self._cache.residency()

    def flush(self) -> tuple[int, int]:
        """Drop all pages of the prefix cache that are not leased; return (pages dropped, pages kept)."""
        dropped = self._cache.flush()
        self._supply.give_back(dropped)
        return len(dropped), self._cache.locked_pages

    def flush_host(self) -> None:
        """Drop what the host has of evicted pages."""
        self._host.flush()


@dataclass(frozen=True, slots=True)
class RowMemory:
    """Four parts that describe the same rows; most users need more than one of them.

    Attributes:
        states: lengths and token ids, by row.
        pool: the rows, and the pages of each.
        kv: gives pages to rows and takes them back.
        host: pages of swapped requests, and pages that were evicted.
    """

    states: RowStates
    pool: ReqToTokenPool
    kv: KVMemory
    host: HostPages
