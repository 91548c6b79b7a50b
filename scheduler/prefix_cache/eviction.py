"""The order of eviction: a policy ranks leaves, `EvictionQueue` finds the leaf of the lowest rank.

A policy (`EVICTION_RANKS`) is a pure function of how a node has been used. The queue relies on one property: use only
raises a rank. So the rank in an entry may be too low but is never too high, and the queue computes it again when the
entry reaches the top (lazy re-keying). Using a node, which is far more frequent than eviction, does not touch the
queue. A rank is one integer, because a heap mostly compares: with pairs an eviction takes 1.5 times as long.

The policies are those of SGLang (sglang:mem_cache/evict_policy.py). SGLang counts a use at each insertion; here each
request that leases a node counts.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable
from typing import Final

from ...runtime.config.engine_config import EvictionPolicyName
from .radix_node import RadixNode
from .wants import Wants

CLOCK_BITS: Final = 64
PROTECTED_USES: Final = 2
_MIN_COMPACTION: Final = 64
MAX_LEAVES: Final = 64
"""The most leaves that an eviction passes over, because no tier has them, and that `next_leaves` finds in a heap."""


Rank = Callable[[RadixNode], int]
"""The rank of a leaf; the lowest is evicted first. Use may raise a rank; nothing lowers it."""


def lru(node: RadixNode) -> int:
    """Evicts the least recently used leaf first."""
    return node.last_access


def lfu(node: RadixNode) -> int:
    """Evicts the leaf with the fewest uses first, then the least recent. Leaves that were hot once stay for long."""
    return (node.num_uses << CLOCK_BITS) + node.last_access


def fifo(node: RadixNode) -> int:
    """Evicts the oldest leaf first, whether it was used or not."""
    return node.created


def slru(node: RadixNode) -> int:
    """Evicts leaves that only one request has used first (the least recent of them), then the least recent of the rest.

    A scan (many prompts, each seen once) only evicts from the first segment; the second one stays.
    """
    protected = node.num_uses >= PROTECTED_USES
    return (protected << CLOCK_BITS) + node.last_access


def by_priority(node: RadixNode) -> int:
    """Evicts the leaf of the lowest `priority` first, then the least recent."""
    return (node.priority << CLOCK_BITS) + node.last_access


EVICTION_RANKS: Final[dict[EvictionPolicyName, Rank]] = {
    "lru": lru,
    "lfu": lfu,
    "fifo": fifo,
    "slru": slru,
    "priority": by_priority,
}


class EvictionClass(enum.IntEnum):
    """Classes of leaves, in the order of eviction, whatever their ranks: one goes when those before it are empty.

    - DEAD: pages of closed sessions, and of prompts that are unlikely to be repeated, such as those of the background;
      a later use, but for one of the background, makes them ordinary.
    - WANTED: pages of waiting requests, ordered by `Wants`.
    - PROMISED: pages under a pin or a promise.
    """

    DEAD = 0
    ORDINARY = 1
    WANTED = 2
    PROMISED = 3


def class_of(node: RadixNode) -> EvictionClass:
    """The class of a node."""
    if node.pin_ref:
        return EvictionClass.PROMISED
    if node.num_wants:
        return EvictionClass.WANTED
    return EvictionClass.DEAD if node.is_dead else EvictionClass.ORDINARY


class EvictionQueue:
    """The unlocked leaves, by class.

    Each class but that of the wanted ones is a heap by rank, with at most one entry per node. An entry is dropped when
    it reaches the top if its node is locked, has children, has left the tree, or belongs to another class. `note` adds
    the node again when that state ends.
    """

    def __init__(self, rank: Rank, wants: Wants) -> None:
        self._rank = rank
        self._seq = 0
        self._wants = wants
        self._heaps: dict[EvictionClass, _LazyHeap] = {
            each: _LazyHeap(each) for each in EvictionClass if each is not EvictionClass.WANTED
        }

    def note(self, node: RadixNode) -> None:
        """Add a leaf that has become evictable, unless the heap has an entry for it."""
        heap = self._heaps.get(class_of(node))
        if heap is not None and not node.queued & heap.bit:
            node.queued |= heap.bit
            self._seq += 1  # orders equal ranks, so that nodes are never compared
            heapq.heappush(heap.entries, (self._rank(node), self._seq, node))

    def class_changed(self, node: RadixNode) -> None:
        """Note that a node may have another class than before."""
        current = class_of(node)
        for each, heap in self._heaps.items():
            if each is not current:
                heap.discard(node)
        if node.is_evictable_leaf:
            self.note(node)

    def discard(self, node: RadixNode) -> None:
        """Note that a node has left the tree, so its entries are stale."""
        for heap in self._heaps.values():
            heap.discard(node)

    def pop(self, window_pages: int = 0) -> RadixNode | None:
        """Return the leaf to evict first, without its entry; None if there is none.

        Among the leaves of a class that are next, with `window_pages` in all, one that a tier has goes before others.
        """
        return (
            self._pop_stored(self._heaps[EvictionClass.DEAD], window_pages)
            or self._pop_stored(self._heaps[EvictionClass.ORDINARY], window_pages)
            or next(self._wants.leaves(), None)
            or self._pop(self._heaps[EvictionClass.PROMISED])
        )

    def _pop_stored(self, heap: _LazyHeap, window_pages: int) -> RadixNode | None:
        passed: list[RadixNode] = []
        chosen = self._pop(heap)
        while chosen is not None and not chosen.is_stored and window_pages > 0:
            passed.append(chosen)
            window_pages -= len(chosen.pages)
            chosen = self._pop(heap) if window_pages > 0 and len(passed) < MAX_LEAVES else None
        if chosen is None and passed:
            chosen = passed.pop(0)
        for node in passed:
            self.note(node)
        return chosen

    def next_leaves(self, num_pages: int) -> list[RadixNode]:
        """The leaves that are evicted next, with so many pages in all; without the promised ones."""
        leaves: list[RadixNode] = []
        for heap in (self._heaps[EvictionClass.DEAD], self._heaps[EvictionClass.ORDINARY]):
            taken: list[RadixNode] = []
            while num_pages > 0 and len(taken) < MAX_LEAVES and (node := self._pop(heap)) is not None:
                taken.append(node)
                num_pages -= len(node.pages)
            for node in taken:
                self.note(node)
            leaves += taken
        for node in self._wants.leaves() if num_pages > 0 else ():
            leaves.append(node)
            num_pages -= len(node.pages)
            if num_pages <= 0:
                break
        return leaves

    def _pop(self, heap: _LazyHeap) -> RadixNode | None:
        rank_of, entries = self._rank, heap.entries
        while entries:
            rank, _, node = heapq.heappop(entries)
            node.queued &= ~heap.bit
            if not heap.holds(node):
                continue
            if rank_of(node) == rank:
                return node
            self.note(node)  # used since the entry was made: insert it with its new rank
        return None

    def finds(self, node: RadixNode) -> bool:
        """Whether the queue has this evictable leaf; for checks."""
        heap = self._heaps.get(class_of(node))
        return heap is None or bool(node.queued & heap.bit)


class _LazyHeap:
    """A heap of nodes from which stale entries are removed in bulk: removing one alone takes a search.

    Attributes:
        bit: the bit of `RadixNode.queued` that says whether a node has an entry here.
        entries: the heap, by (rank, order of arrival).
    """

    def __init__(self, of: EvictionClass) -> None:
        self.bit: Final = 1 << of
        self._class = of
        self.entries: list[tuple[int, int, RadixNode]] = []
        self._num_discarded = 0

    def holds(self, node: RadixNode) -> bool:
        """Whether an entry for this node is valid."""
        if node.lock_ref or node.children or node.parent is None:  # `is_evictable_leaf`, without the call
            return False
        return class_of(node) is self._class

    def discard(self, node: RadixNode) -> None:
        """Note that the entry of a node, if there is one, is stale. When half of the entries are, they are removed."""
        if not node.queued & self.bit:
            return
        self._num_discarded += 1
        if self._num_discarded < _MIN_COMPACTION or 2 * self._num_discarded < len(self.entries):
            return
        live: list[tuple[int, int, RadixNode]] = []
        for entry in self.entries:
            if self.holds(entry[2]):
                live.append(entry)
            else:
                entry[2].queued &= ~self.bit
        heapq.heapify(live)
        self.entries = live
        self._num_discarded = 0
