"""`RadixCache`: computed prefixes in a radix tree, so that equal prefixes are stored and computed once.

Each node holds a run of whole pages. The children of a node differ in their first page; a dictionary from that page's
bytes finds the child. Keys are bytes, so comparing 8,192 tokens is one memcmp. Each namespace (`extra_key`) has its own
root, so requests with different adapters or salts never share pages.

    root ── "You are a helpful" ─┬─ "assistant. What is" ── ...        lock_ref counts the leases that end at a node
                                 └─ "pirate. Where"                    or below it: > 0 means locked

Source: SGLang's RadixAttention (sglang:mem_cache/radix_cache.py). Differences: a look-up never splits a node. A lease
is extended from its end instead of from the root. Eviction takes pages from the end of the lowest-ranked leaf instead
of the whole leaf, so that one short request does not evict a long prefix.

In a model with state layers a prefix is reused only up to a node with a checkpoint (`Checkpoints`).

This module has the tree. `EvictionQueue` orders the leaves, `Wants` has the prefixes of waiting requests, `Pins` the
clients' pins, `Sessions` the ends of conversations, `TierPages` has what tiers keep; `MissExplainer` explains misses
with the `EvictionHistory`, and `BlockEvents` records changes for subscribers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import Final

import numpy as np

from ...runtime.scheduler_report import HistogramCounts
from ..arrays import EMPTY, TOKEN_ID_BYTES, AnyIntArray, IntArray
from ..records.verdict import CacheMiss
from .base import Lease, PrefixCache, PrefixMatch, Session
from .block_events import BlockRecorder
from .eviction import EvictionQueue, Rank, lru
from .miss_explainer import FLUSHED, Eviction, EvictionHistory, MissExplainer
from .pins import PinKey, Pins
from .radix_node import Checkpoints, RadixNode, nodes_of, pages_in, path_to_root, prefix_of, verify_nodes
from .residency import BlockResidency
from .sessions import Sessions
from .tier_pages import CopyOut, TierPages
from .wants import Want, Wants

MAX_TOMBSTONES: Final = 16_384
_LONG_LEAF_PAGES: Final = 256
"""The most pages that eviction copies to take one page."""


class RadixCache(PrefixCache):
    """See the module. `PrefixCache` describes the methods."""

    def __init__(
        self,
        page_size: int,
        *,
        eviction: Rank = lru,
        max_pinned_pages: int = 0,
        max_evictions_remembered: int = MAX_TOMBSTONES,
        free_checkpoint: Callable[[int], None] | None = None,
        blocks: BlockRecorder | None = None,
        stored_window_pages: int = 0,
        copy_out: CopyOut | None = None,
    ) -> None:
        """Make an empty cache.

        Args:
            page_size: tokens per page.
            eviction: the order of eviction; see `EVICTION_RANKS`.
            max_pinned_pages: the most pages that pins cover, and the most pins; 0: pinning has no effect.
            max_evictions_remembered: the most evictions that `explain` knows about.
            free_checkpoint: takes back the slot of a checkpoint; None: the model has no state layers.
            blocks: records what enters and leaves the tree; None: nothing does.
            stored_window_pages, copy_out: see `TierPages`.
        """
        self.page_size: Final = page_size
        self._page_bytes = page_size * TOKEN_ID_BYTES
        self._roots: dict[str, RadixNode] = {}
        self._evictable_pages = 0
        self._locked_pages = 0
        self._generation = 0
        self._clock = 0
        self._num_evictions = 0
        self._now_s = 0.0  # of the last pass
        self._wants = Wants()
        self._queue = EvictionQueue(eviction, self._wants)
        self._pins = Pins(max_pinned_pages)
        self._sessions = Sessions()
        self._checkpoints = None if free_checkpoint is None else Checkpoints(free_checkpoint)
        self._eviction_history = EvictionHistory(max_evictions_remembered)
        self._explainer = MissExplainer(self._roots, self._eviction_history, page_size)
        self._residency = BlockResidency()
        self._blocks = blocks if blocks is not None else BlockRecorder()
        self._tier_pages = TierPages(self._queue, page_size, stored_window_pages, copy_out)

    @property
    def shares(self) -> bool:
        return True

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def evictable_pages(self) -> int:
        return self._evictable_pages

    @property
    def locked_pages(self) -> int:
        return self._locked_pages

    @property
    def pinned_pages(self) -> int:
        return self._pins.num_pages

    @property
    def num_pins(self) -> int:
        return len(self._pins)

    # ------------------------------------------------------------ look-up and locks

    def match(self, extra_key: str, token_ids: bytes, max_pages: int) -> PrefixMatch:
        match = self._known(extra_key, token_ids, max_pages)
        return match if self._checkpoints is None else self._to_checkpoint(match)

    def _to_checkpoint(self, match: PrefixMatch) -> PrefixMatch:
        """The part of a match up to its last checkpoint."""
        node: RadixNode | None = match.node
        if node is None:
            return match
        num_pages, in_node = match.num_pages, match.pages_in_node
        while node.parent is not None and (in_node < len(node.pages) or not node.checkpoint):
            num_pages -= in_node
            node = node.parent
            in_node = len(node.pages)
        return PrefixMatch(num_pages, node, len(node.pages), node.checkpoint, match.num_pages)

    def _known(self, extra_key: str, token_ids: bytes, max_pages: int) -> PrefixMatch:
        """The longest prefix with pages in the tree."""
        node = self._roots.get(extra_key)
        if node is None:
            return PrefixMatch()
        page_bytes = self._page_bytes
        end = min(len(token_ids) // page_bytes, max_pages) * page_bytes
        offset = 0
        while offset < end:
            child = node.children.get(token_ids[offset : offset + page_bytes])
            if child is None:
                break
            if offset + len(child.key) > end or not token_ids.startswith(child.key, offset):
                common = self._common_pages(child.key, token_ids, offset, end)
                return PrefixMatch(offset // page_bytes + common, child, common)
            offset += len(child.key)
            node = child
        return PrefixMatch(offset // page_bytes, node, len(node.pages))

    def unlocked_pages(self, match: PrefixMatch) -> int:
        node: RadixNode | None = match.node
        if node is None or node.lock_ref:
            return 0
        count = match.pages_in_node
        node = node.parent
        while node is not None and not node.lock_ref:
            count += len(node.pages)
            node = node.parent
        return count

    def lock(
        self,
        extra_key: str,
        match: PrefixMatch,
        priority: int = 0,
        *,
        is_use: bool = True,
        in_memory: bool = False,
        background: bool = False,
    ) -> Lease:
        node = self._end_of(match)
        if node is None:
            node = self._root(extra_key)
        if match.checkpoint and is_use and self._checkpoints is not None:
            self._checkpoints.used(node)
        lease = Lease(
            extra_key,
            match.num_pages,
            node,
            priority,
            is_use=is_use,
            in_memory=in_memory,
            background=background,
        )
        self._lock_path(lease, None)
        if is_use and match.num_pages and not self._residency.is_empty:
            self._residency.used(self.pages_of(lease), self._now_s)
        return lease

    def pages_of(self, lease: Lease) -> IntArray:
        runs = [node.pages for node in path_to_root(lease.node)]
        runs.reverse()
        return np.concatenate(runs)

    def extend(self, lease: Lease, token_ids: bytes, pages: AnyIntArray) -> AnyIntArray:
        end = len(token_ids)
        assert end == len(pages) * self._page_bytes, (end, len(pages))
        page_bytes = self._page_bytes
        node: RadixNode = lease.node
        kept: list[AnyIntArray] = []
        offset = 0
        while offset < end:
            first_page = token_ids[offset : offset + page_bytes]
            child = node.children.get(first_page)
            if child is None:
                self._clock += 1
                child = RadixNode(
                    token_ids[offset:],
                    pages[offset // page_bytes :].copy(),
                    node,
                    created=self._clock,
                    priority=lease.priority,
                )
                child.used_s = self._now_s
                child.in_memory = lease.in_memory
                node.children[first_page] = child
                self._eviction_history.inserted(node, first_page)
                self._blocks.inserted(child)
                self._residency.entered(child.pages, self._now_s)
                self._evictable_pages += len(child.pages)  # until `_lock_path` below
                self._generation += 1
            elif not token_ids.startswith(child.key, offset):
                child = self._split(child, self._common_pages(child.key, token_ids, offset, end))
            kept.append(child.pages)
            offset += len(child.key)
            node = child
        begin, lease.node = lease.node, node
        self._lock_path(lease, begin)
        lease.num_pages += len(pages)
        return np.concatenate(kept) if kept else EMPTY

    def release(self, lease: Lease, *, once: bool = False, session: Session | None = None) -> None:
        end: RadixNode = lease.node
        self._clock += 1
        for node in path_to_root(lease.node):
            node.lock_ref -= 1
            # The rank of a node that only this lease used has no entry yet, so it may be the lowest.
            if lease.is_use:
                node.last_access = self._clock
                node.used_s = self._now_s
                stays_dead = node.is_dead and lease.background
                node.is_dead = once and (stays_dead or node.num_uses == (not lease.background))
            if not node.lock_ref:
                self._locked_pages -= len(node.pages)
                self._evictable_pages += len(node.pages)
                self._note_if_evictable(node)
        lease.node = None
        lease.num_pages = 0
        if session is not None and session.closed:
            self._bury(end, session.tenant)
        elif session is not None:
            self._sessions.end_turn(session, end)

    def forget(self, lease: Lease) -> IntArray:
        node: RadixNode | None = lease.node
        self.release(lease)
        dropped: list[AnyIntArray] = []
        while node is not None and node.parent is not None and not (node.lock_ref or node.children):
            parent = node.parent
            dropped.append(node.pages)
            self._evictable_pages -= len(node.pages)
            self._queue.discard(node)
            self._remove(node)
            node = parent
        if not dropped:
            return EMPTY
        self._generation += 1
        return np.concatenate(dropped)

    # ------------------------------------------------------------ states

    @property
    def num_checkpoints(self) -> int:
        return 0 if self._checkpoints is None else len(self._checkpoints)

    def checkpoints(self) -> list[int]:
        return [] if self._checkpoints is None else self._checkpoints.taken()

    def keep_state(self, lease: Lease, num_pages: int, checkpoint: int) -> bool:
        assert self._checkpoints is not None and 0 < num_pages <= lease.num_pages, (
            num_pages,
            lease.num_pages,
        )
        node: RadixNode = lease.node
        end = lease.num_pages
        while end - len(node.pages) >= num_pages:
            end -= len(node.pages)
            assert node.parent is not None
            node = node.parent
        if end > num_pages:
            node = self._split(node, len(node.pages) - (end - num_pages))
        if node.checkpoint:
            self._checkpoints.used(node)
            return False
        self._checkpoints.put(node, checkpoint)
        self._generation += 1
        return True

    def drop_oldest_checkpoint(self, keep: Collection[int]) -> bool:
        """Free the slot of the least recently used checkpoint that is not in `keep`; False: there is none."""
        assert self._checkpoints is not None
        if not self._checkpoints.drop_oldest(keep):
            return False
        self._generation += 1
        return True

    # ------------------------------------------------------------ eviction

    def evict(self, num_pages: int, *, to_host: bool = False) -> IntArray:
        pages = self._drop(num_pages, self._num_evictions + 1, to_host=to_host)
        if not self._residency.is_empty:
            self._residency.evicted(pages, self._now_s)
        return pages

    def flush(self) -> IntArray:
        dropped = self._drop(self._evictable_pages, FLUSHED)
        if not self._locked_pages:
            self._blocks.cleared()
        return dropped

    def _drop(self, num_pages: int, evicted_at: int, *, to_host: bool = False) -> IntArray:
        """Take pages from the lowest-ranked leaves; `evicted_at` goes into the eviction history."""
        freed: list[AnyIntArray] = []
        missing = num_pages
        while missing > 0 and (node := self._tier_pages.pop()) is not None:
            # Cutting a leaf copies the pages that stay, so a long leaf is first split in halves until it is short. Then
            # each page is copied a few times in all. Cutting one page at a time from a leaf of a million pages would
            # copy each page up to a million times.
            while len(node.pages) > max(_LONG_LEAF_PAGES, 2 * missing):
                self._split(node, len(node.pages) // 2)
            surplus = len(node.pages) - missing
            if to_host:
                self._tier_pages.evicted(node, max(0, surplus))
            if surplus > 0:
                freed.append(node.pages[surplus:])
                missing = 0
                self._truncate(node, surplus, self._eviction(node, evicted_at))
            else:
                freed.append(node.pages)
                missing = -surplus
                self._remove(node, self._eviction(node, evicted_at))
        self._evictable_pages -= num_pages - missing
        if not freed:
            return EMPTY
        if evicted_at != FLUSHED:
            self._num_evictions = evicted_at
        self._generation += 1
        return np.concatenate(freed)

    def _eviction(self, node: RadixNode, evicted_at: int) -> Eviction:
        return Eviction(evicted_at, self._now_s, node.used_s)

    def _truncate(self, node: RadixNode, num_pages: int, eviction: Eviction) -> None:
        """Cut a leaf after `num_pages` pages. Eviction has taken it out of the queue."""
        cut = num_pages * self._page_bytes
        self._eviction_history.truncated(node, node.key[cut : cut + self._page_bytes], eviction)
        if node.pin_ref:
            self._pins.truncated(len(node.pages) - num_pages)
        if self._checkpoints is not None:
            self._checkpoints.removed(node)
        node.pages = node.pages[:num_pages].copy()
        node.key = node.key[:cut]
        self._tier_pages.truncated(node)
        self._blocks.truncated(node)
        self._queue.note(node)

    def _note_if_evictable(self, node: RadixNode) -> None:
        if node.lock_ref or node.children:
            return
        if node.parent is not None:
            self._queue.note(node)
        elif node.namespace is not None:
            # An empty root. Clients choose namespaces, so empty roots must not accumulate.
            del self._roots[node.namespace]
            node.namespace = None
            self._generation += 1

    def _remove(self, node: RadixNode, eviction: Eviction | None = None) -> None:
        """Remove a leaf from the tree; `eviction`: None for other causes."""
        parent = node.parent
        assert parent is not None
        first_page = node.key[: self._page_bytes]
        if eviction is not None:
            self._eviction_history.removed(node, parent, first_page, eviction)
        if node.pin_ref:
            self._pins.removed(node, parent)
        if node.num_wants:
            self._wants.removed(node, parent)
        self._sessions.removed(node, parent)
        if self._checkpoints is not None:
            self._checkpoints.removed(node)
        self._blocks.removed(node)
        del parent.children[first_page]
        node.parent = None
        if not parent.children:
            self._note_if_evictable(parent)

    # ------------------------------------------------------------ tiers

    def take_unstored(self, num_pages: int, min_pages: int) -> list[tuple[str, bytes]]:
        return self._tier_pages.take_unstored(num_pages, min_pages)

    def note_stored(self, lease: Lease) -> None:
        self._tier_pages.note_stored(lease.node)

    def forget_stored(self) -> None:
        self._tier_pages.forget_stored(nodes_of(self._roots))

    # ------------------------------------------------------------ waiting requests

    @property
    def counts_wants(self) -> bool:
        return self._wants.has_room

    def want(self, seq: int, match: PrefixMatch, num_missing: int) -> None:
        if match.num_pages:
            self._wants_changed(self._wants.put(seq, Want(match.node, num_missing)))
        else:
            self.unwant(seq)

    def unwant(self, seq: int) -> None:
        self._wants_changed(self._wants.drop(seq))

    def _wants_changed(self, nodes: Iterable[RadixNode]) -> None:
        for node in nodes:
            self._queue.class_changed(node)

    # ------------------------------------------------------------ pins

    def pin(self, extra_key: str, token_ids: bytes, until_s: float, tenant: str | None = None) -> int:
        pins, key = self._pins, self._pin_key(extra_key, token_ids, tenant)
        self._pins_changed(pins.end(key))
        match = self._known(extra_key, token_ids, len(token_ids) // self._page_bytes)
        if tenant is not None and match.num_pages:
            above = match.node if match.pages_in_node == len(match.node.pages) else match.node.parent
            self._pins_changed(pins.end_covered(above, tenant, until_s))
            if not pins.has_room() or self._unpinned_pages(match) > pins.max_pages - pins.num_pages:
                self._pins_changed(pins.make_room(self._unpinned_pages(match), tenant))
        surplus = self._unpinned_pages(match) - (pins.max_pages - pins.num_pages)
        if surplus > 0:
            match = self._known(extra_key, token_ids, match.num_pages - surplus)
        if not match.num_pages or not pins.has_room():
            return 0
        node = self._end_of(match)
        assert node is not None
        self._pins_changed(pins.begin(key, node, until_s))
        return match.num_pages

    def unpin(self, extra_key: str, token_ids: bytes) -> None:
        self._pins_changed(self._pins.end(self._pin_key(extra_key, token_ids, None)))

    def expire_pins(self, now_s: float) -> None:
        self._now_s = now_s
        self._pins_changed(self._pins.expire(now_s))

    def _pin_key(self, extra_key: str, token_ids: bytes, tenant: str | None) -> PinKey:
        whole_pages = len(token_ids) // self._page_bytes * self._page_bytes
        return self._pins.key_of(extra_key, token_ids[:whole_pages], tenant)

    def _pins_changed(self, nodes: Iterable[RadixNode]) -> None:
        for node in nodes:
            self._queue.class_changed(node)

    @staticmethod
    def _unpinned_pages(match: PrefixMatch) -> int:
        node: RadixNode | None = match.node
        if node is None or node.pin_ref:
            return 0
        above = (len(each.pages) for each in path_to_root(node) if each is not node and not each.pin_ref)
        return match.pages_in_node + sum(above)

    # ------------------------------------------------------------ sessions

    def begin_turn(self, key: str, tenant: str, group: str, now_s: float) -> Session:
        return self._sessions.begin_turn(key, tenant, group, now_s)

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def newest_sessions(self, limit: int) -> list[tuple[Session, int]]:
        newest = list(islice(reversed(self._sessions), limit))
        return [(each, sum(len(node.pages) for node in self._sessions.covered(each))) for each in newest]

    def continues(self, session: Session, match: PrefixMatch) -> bool:
        return self._sessions.continues(session, match)

    def session(self, key: str) -> Session | None:
        return self._sessions.find(key)

    def demote(self, session: Session, *, close: bool) -> int:
        ends = self._sessions.take_ends(session)
        num_pages = sum(self._bury(end, session.tenant) for end in ends)
        if close:
            self._sessions.close(session)
        else:
            self._sessions.put_ends(session, ends)
        return num_pages

    def _bury(self, end: RadixNode, tenant: str) -> int:
        """Make a path dead from its end up to what something else covers; return the number of pages."""
        num_pages = 0
        for node in path_to_root(end):
            is_covered = node.lock_ref or self._sessions.ends_at(node)
            if node.parent is None or is_covered or not all(each.is_dead for each in node.children.values()):
                break
            node.is_dead = True
            self._pins_changed(self._pins.end_promises_at(node, tenant))
            self._queue.class_changed(node)
            if self._checkpoints is not None:
                self._checkpoints.unused(node)
            num_pages += len(node.pages)
        return num_pages

    def promise(self, session: Session, until_s: float) -> tuple[int, int]:
        kept = asked = 0
        for end in tuple(session.ends):
            namespace, token_ids = prefix_of(end)
            asked += len(token_ids) // self._page_bytes
            kept += self.pin(namespace, token_ids, until_s, session.tenant)
        return kept, asked

    # ------------------------------------------------------------ explanations

    def explain(self, extra_key: str, token_ids: bytes, match: PrefixMatch, rid: str) -> CacheMiss:
        return self._explainer.explain(extra_key, token_ids, match, rid, self._now_s)

    def residency(self) -> dict[str, HistogramCounts]:
        return self._residency.figures()

    # ------------------------------------------------------------ structure

    def _root(self, extra_key: str) -> RadixNode:
        root = self._roots.get(extra_key)
        if root is None:
            root = self._roots[extra_key] = RadixNode(b"", EMPTY, None, namespace=extra_key)
            self._generation += 1
        return root

    def _end_of(self, match: PrefixMatch) -> RadixNode | None:
        """The node that ends where the match ends; split if necessary. None if the namespace has no root."""
        node: RadixNode | None = match.node
        if node is not None and match.pages_in_node < len(node.pages):
            return self._split(node, match.pages_in_node)
        return node

    def _split(self, node: RadixNode, num_pages: int) -> RadixNode:
        """Split a node after `num_pages`; return the new upper part. Leases and pins end at the lower, old object."""
        assert 0 < num_pages < len(node.pages) and node.parent is not None
        cut = num_pages * self._page_bytes
        upper = RadixNode(
            node.key[:cut],
            node.pages[:num_pages].copy(),
            node.parent,
            created=node.created,
            priority=node.priority,
        )
        upper.lock_ref = node.lock_ref
        upper.pin_ref = node.pin_ref
        upper.last_access = node.last_access
        upper.used_s = node.used_s
        upper.num_uses = node.num_uses
        upper.is_dead = node.is_dead
        upper.in_memory = node.in_memory
        node.parent.children[node.key[: self._page_bytes]] = upper
        node.key = node.key[cut:]
        node.pages = node.pages[num_pages:].copy()
        node.parent = upper
        upper.children[node.key[: self._page_bytes]] = node
        self._tier_pages.split(upper, node)
        self._blocks.split(upper, node)
        self._generation += 1
        return upper

    def _lock_path(self, lease: Lease, stop: RadixNode | None) -> None:
        """Count a lease on its node and the ancestors below `stop`, from which on it is counted already."""
        for each in path_to_root(lease.node):
            if each is stop:
                break
            if not each.lock_ref:
                self._evictable_pages -= len(each.pages)
                self._locked_pages += len(each.pages)
            each.lock_ref += 1
            counts = lease.is_use and not lease.background
            each.num_uses += counts
            each.priority = max(each.priority, lease.priority)
            each.in_memory = each.in_memory and (lease.in_memory or not lease.is_use)
            if each.is_dead and counts:
                each.is_dead = False
                self._queue.class_changed(each)

    def _common_pages(self, key: bytes, token_ids: bytes, offset: int, end: int) -> int:
        count = min(len(key), end - offset) // TOKEN_ID_BYTES
        ours = np.frombuffer(key, dtype=np.int32, count=count)
        theirs = np.frombuffer(token_ids, dtype=np.int32, count=count, offset=offset)
        different = ours != theirs
        first = int(different.argmax()) if different.any() else count
        return first // self.page_size

    # ------------------------------------------------------------ checks

    def all_pages(self) -> IntArray:
        return pages_in(self._roots)

    def verify(self, leases: Iterable[Lease]) -> list[str]:
        counts = (self._evictable_pages, self._locked_pages)
        wrong = list(verify_nodes(self._roots, leases, self._queue.finds, self.page_size, counts))
        wrong.extend(self._pins.verify(nodes_of(self._roots)))
        wrong.extend(self._wants.verify(nodes_of(self._roots)))
        wrong.extend(self._sessions.verify(nodes_of(self._roots)))
        if self._checkpoints is not None:
            wrong.extend(self._checkpoints.verify(nodes_of(self._roots)))
        return wrong
