"""`Wants`: the cached prefixes of the requests that wait, which eviction takes only after everything else.

Otherwise the prefix of a request that waits long is the least recently used one, and is evicted just before its turn:
with more agents at work than the pool holds, first come first served and `lru` evict exactly what comes next.

A request wants the node at which its match ended when it was last looked up. Among wanted leaves the one goes first
that belongs to the request with the most tokens to compute anyway; a leaf that several requests want counts for the one
with the fewest. Nodes above a leaf need no count: they become leaves only when it is gone, and then its wants end at
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

from .radix_node import RadixNode

MAX_WANTS: Final = 256
"""The most waiting requests that count. A further one counts once it is looked up while there is room."""


class Want(NamedTuple):
    """The cached prefix that one waiting request wants.

    Attributes:
        node: the node at which its match ends.
        num_missing: tokens after the match, which it must compute.
    """

    node: RadixNode
    num_missing: int


class Wants:
    """The wants of waiting requests, by their arrival number. Writes `RadixNode.num_wants`."""

    def __init__(self) -> None:
        self._by_seq: dict[int, Want] = {}

    @property
    def has_room(self) -> bool:
        """Whether one more request can count."""
        return len(self._by_seq) < MAX_WANTS

    def put(self, seq: int, want: Want) -> list[RadixNode]:
        """Set what a waiting request wants; return the nodes that are wanted anew, or no more."""
        if seq not in self._by_seq and not self.has_room:
            return []
        changed = self.drop(seq)
        self._by_seq[seq] = want
        want.node.num_wants += 1
        return [*changed, want.node]

    def drop(self, seq: int) -> list[RadixNode]:
        """A request waits no more; return the node that it wanted, if there is one."""
        want = self._by_seq.pop(seq, None)
        if want is None:
            return []
        want.node.num_wants -= 1
        return [want.node]

    def removed(self, node: RadixNode, parent: RadixNode) -> None:
        """A wanted leaf leaves the tree: what ended there ends at its parent, or nowhere if that is a root."""
        for seq, want in list(self._by_seq.items()):
            if want.node is not node:
                continue
            if parent.parent is None:
                del self._by_seq[seq]
            else:
                self._by_seq[seq] = Want(parent, want.num_missing)
                parent.num_wants += 1
        node.num_wants = 0

    def leaves(self) -> Iterator[RadixNode]:
        """The evictable leaves that are not pinned, the one that is evicted first at the beginning."""
        seen = Counter[RadixNode]()
        by_missing = sorted(
            self._by_seq.items(), key=lambda item: (item[1].num_missing, item[0]), reverse=True
        )
        for _, (node, _) in by_missing:
            seen[node] += 1
            if seen[node] == node.num_wants and node.is_evictable_leaf and not node.pin_ref:
                yield node

    def verify(self, nodes: Iterator[RadixNode]) -> Iterator[str]:
        """Yield errors: wrong counters, and wants of nodes that are not in the tree."""
        counts = Counter(want.node for want in self._by_seq.values())
        for node in nodes:
            if node.num_wants != counts.pop(node, 0):
                yield f"a node counts {node.num_wants} waiting requests, but another number ends there"
        if counts:
            yield f"waiting requests want {len(counts)} nodes that are not in the tree"
