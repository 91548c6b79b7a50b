"""What goes first when memory is needed: `EvictionPolicy` ranks leaves, `EvictionQueue` finds the lowest.

A policy is a pure function of how a node has been used. The queue relies on one property of it: use only raises a rank.
So an entry may be too low but never too high, and it is enough to look again when it comes up (lazy re-keying):
nothing is done for the queue when a node is used, which happens far more often than eviction. A rank is one integer
because a heap does little else than compare: with pairs an eviction takes half as long again.

Policies as in SGLang (sglang:mem_cache/evict_policy.py); its counts go up with each insertion, ours with each request.
"""

from __future__ import annotations

import heapq
from typing import Final, Protocol, assert_never

from ...runtime.config.engine_config import EvictionPolicyName
from .radix_node import RadixNode

CLOCK_BITS: Final = 64
PROTECTED_USES: Final = 2
_MIN_COMPACTION: Final = 64


class NodeUse(Protocol):
    """What a policy may look at; see `RadixNode`."""

    @property
    def created(self) -> int: ...
    @property
    def last_access(self) -> int: ...
    @property
    def num_uses(self) -> int: ...
    @property
    def priority(self) -> int: ...


class EvictionPolicy(Protocol):
    """An order of unlocked leaves."""

    def rank(self, node: NodeUse) -> int:
        """The lowest goes first; use may raise it, and nothing lowers it."""
        ...


class LruEviction:
    """The one that has not been used for longest."""

    __slots__ = ()

    def rank(self, node: NodeUse) -> int:
        return node.last_access


class LfuEviction:
    """The one with the fewest uses, then the least recent. Keeps what is hot; forgets slowly what was hot once."""

    __slots__ = ()

    def rank(self, node: NodeUse) -> int:
        return (node.num_uses << CLOCK_BITS) + node.last_access


class FifoEviction:
    """The one that came first, used or not."""

    __slots__ = ()

    def rank(self, node: NodeUse) -> int:
        return node.created


class SlruEviction:
    """The least recent of those that only one request has used, then the least recent of the rest.

    A scan (many prompts, each seen once) passes through the first segment and leaves the second alone.
    """

    __slots__ = ()

    def rank(self, node: NodeUse) -> int:
        protected = node.num_uses >= PROTECTED_USES
        return (protected << CLOCK_BITS) + node.last_access


class PriorityEviction:
    """The one whose most urgent user was the least urgent, then the least recent."""

    __slots__ = ()

    def rank(self, node: NodeUse) -> int:
        return (node.priority << CLOCK_BITS) + node.last_access


LRU: Final = LruEviction()


def make_eviction(name: EvictionPolicyName) -> EvictionPolicy:
    """The policy of a name in the configuration."""
    match name:
        case "lru":
            return LRU
        case "lfu":
            return LfuEviction()
        case "fifo":
            return FifoEviction()
        case "slru":
            return SlruEviction()
        case "priority":
            return PriorityEviction()
        case _:
            assert_never(name)


class EvictionQueue:
    """The unlocked leaves in the order of their rank, those without a pin before those with one.

    Two heaps with at most one entry per node in each. An entry whose node is locked, has children, is gone, or belongs
    into the other heap, is dropped when it comes up: whoever ends such a state says so here.
    """

    __slots__ = ("_pinned", "_rank", "_seq", "_unpinned")

    def __init__(self, policy: EvictionPolicy) -> None:
        self._rank = policy.rank
        self._seq = 0
        self._unpinned = _LazyHeap(pinned=False)
        self._pinned = _LazyHeap(pinned=True)

    def note(self, node: RadixNode) -> None:
        """An evictable leaf is there."""
        heap = self._pinned if node.pin_ref else self._unpinned
        if not node.queued & heap.bit:
            node.queued |= heap.bit
            self._seq += 1  # decides between equal ranks, so that nodes need no order
            heapq.heappush(heap.entries, (self._rank(node), self._seq, node))

    def pin_changed(self, node: RadixNode) -> None:
        """The first pin of a node has begun, or the last has ended."""
        (self._unpinned if node.pin_ref else self._pinned).discard(node)
        if node.is_evictable_leaf:
            self.note(node)

    def discard(self, node: RadixNode) -> None:
        """A node has left the tree; its entries are of no use any more."""
        self._unpinned.discard(node)
        self._pinned.discard(node)

    def pop(self, *, spare_pins: bool = False) -> RadixNode | None:
        """Take out the leaf that goes first; None if there is no evictable leaf (`spare_pins`: without a pin)."""
        rank_of = self._rank
        for heap in (self._unpinned,) if spare_pins else (self._unpinned, self._pinned):
            entries = heap.entries
            while entries:
                rank, _, node = heapq.heappop(entries)
                node.queued &= ~heap.bit
                if not heap.holds(node):
                    continue
                if rank_of(node) == rank:
                    return node
                self.note(node)  # used since the entry was made: back with its new rank
        return None

    def finds(self, node: RadixNode) -> bool:
        """Whether `pop` would come to this evictable leaf in its turn; for checks."""
        heap = self._pinned if node.pin_ref else self._unpinned
        return bool(node.queued & heap.bit)


class _LazyHeap:
    """A heap of nodes from which entries are struck out by the dozen: alone, each would cost a search.

    Attributes:
        bit: what says in `RadixNode.queued` that a node has an entry here.
        entries: the heap, by (rank, order of arrival).
    """

    __slots__ = ("_num_discarded", "_of_pinned", "bit", "entries")

    def __init__(self, *, pinned: bool) -> None:
        self.bit: Final = 2 if pinned else 1
        self._of_pinned = pinned
        self.entries: list[tuple[int, int, RadixNode]] = []
        self._num_discarded = 0

    def holds(self, node: RadixNode) -> bool:
        """Whether an entry for this node is worth something."""
        if node.lock_ref or node.children or node.parent is None:  # `is_evictable_leaf`, without the call
            return False
        return (node.pin_ref > 0) is self._of_pinned

    def discard(self, node: RadixNode) -> None:
        """Note that an entry, if there is one, is of no use; when most are, they go."""
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
