"""`EvictionHistory`: which page went from behind which node, so that a miss can be explained by an eviction.

An entry is two integers, however long the page or the namespace: a hash that names (place, page), and the count of
evictions when the page went (`FLUSHED` if the cache was emptied then, which made room for nobody). The oldest give way
to new ones. A hash of 64 bits may lie once in 10^19 look-ups; it decides nothing but the words of an explanation.

The place is the end of a node. It gets a name with its first entry and another one when pages are cut off, because
what stood behind the old end does not stand behind the new one. The place before all pages is named by the namespace:
a root that has lost its last page is gone, but what it lost is still known.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from .radix_node import RadixNode

FLUSHED: Final = -1


class EvictionHistory:
    """At most `max_count` of them."""

    __slots__ = ("_evicted_at", "_last_end_id", "_max_count")

    def __init__(self, max_count: int) -> None:
        self._max_count = max_count
        self._evicted_at: OrderedDict[int, int] = OrderedDict()
        self._last_end_id = 0

    def __len__(self) -> int:
        return len(self._evicted_at)

    def removed(self, node: RadixNode, parent: RadixNode, first_page: bytes, evicted_at: int) -> None:
        """A leaf goes as a whole."""
        if node.truncated_key:
            self._evicted_at.pop(node.truncated_key, None)
        self._set(parent, first_page, evicted_at)

    def truncated(self, node: RadixNode, first_page: bytes, evicted_at: int) -> None:
        """The end of a leaf goes, from `first_page` on."""
        self._evicted_at.pop(node.truncated_key, None)  # out of reach now; a leaf may be cut many times
        node.end_id = 0
        node.truncated_key = self._set(node, first_page, evicted_at)

    def inserted(self, parent: RadixNode, first_page: bytes) -> None:
        """The page is cached again."""
        place = parent.end_id or parent.namespace
        if place is not None and self._evicted_at:
            self._evicted_at.pop(hash((place, first_page)), None)

    def find(self, place: RadixNode | str, page: bytes) -> int:
        """When a page went from behind a node or a namespace's beginning: a count, `FLUSHED`, or 0 if none did."""
        name = place if isinstance(place, str) else place.end_id or place.namespace
        return self._evicted_at.get(hash((name, page)), 0) if name is not None else 0

    def _set(self, node: RadixNode, page: bytes, evicted_at: int) -> int:
        name: int | str | None = node.end_id or node.namespace
        if name is None:
            self._last_end_id += 1
            name = node.end_id = self._last_end_id
        key = hash((name, page))
        evicted_at_of = self._evicted_at
        evicted_at_of[key] = evicted_at
        if len(evicted_at_of) > self._max_count:
            evicted_at_of.popitem(last=False)
        return key
