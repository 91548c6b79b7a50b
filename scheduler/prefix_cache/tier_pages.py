"""`TierPages`: which pages of the tree's nodes a tier has, and which prefixes a tier is given before they are evicted.

A tier is the disk or the store of `scheduler/tiers/`. `RadixNode.num_stored` counts the first pages of a node's run
that the tier has; `RadixCache` notifies this class when runs are split and cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from .eviction import EvictionQueue
from .radix_node import RadixNode, path_to_root, prefix_of


class TierPages:
    """See the module."""

    def __init__(self, queue: EvictionQueue, stored_window_pages: int) -> None:
        """Take the queue.

        Args:
            queue: the order of eviction.
            stored_window_pages: of so many pages that are evicted next, those that a tier has go first.
        """
        self._queue: Final = queue
        self._window_pages: Final = stored_window_pages

    def pop(self) -> RadixNode | None:
        """The leaf to evict first, without its entry in the queue; None if there is none."""
        return self._queue.pop(self._window_pages)

    def take_unstored(self, num_pages: int, min_pages: int) -> list[tuple[str, bytes]]:
        """See `PrefixCache`."""
        taken = []
        for leaf in self._queue.next_leaves(num_pages):
            if leaf.is_stored or leaf.in_memory or leaf.is_dead:
                continue
            if sum(len(node.pages) for node in path_to_root(leaf)) >= min_pages:
                taken.append(prefix_of(leaf))
                self.note_stored(leaf)
        return taken

    def note_stored(self, end: RadixNode) -> None:
        """A tier has the prefix that ends with a node."""
        for node in path_to_root(end):
            node.num_stored = len(node.pages)

    def forget_stored(self, nodes: Iterable[RadixNode]) -> None:
        """The tier has none of these nodes any more."""
        for node in nodes:
            node.num_stored = 0

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """`lower` was split; `upper` has the beginning of its run."""
        upper.num_stored = min(lower.num_stored, len(upper.pages))
        lower.num_stored -= upper.num_stored

    def truncated(self, node: RadixNode) -> None:
        """The end of a leaf's run was cut off."""
        node.num_stored = min(node.num_stored, len(node.pages))
