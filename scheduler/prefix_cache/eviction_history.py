"""`EvictionHistory`: remembers which page was evicted after which node, so that an eviction can explain a miss.

An entry is two integers, independent of the length of the page or the namespace: a hash of (place, page), and the count
of evictions when the page was evicted (`FLUSHED` if a flush dropped it). New entries displace the oldest ones. A wrong
match of the 64-bit hash happens about once in 10^19 look-ups, and affects only the text of an explanation.

The place is the end of a node. It gets an id with its first entry, and a new one when pages are cut off, because other
pages follow the new end. The place before all pages has the namespace as its id, so the entries of a root stay valid
after the root has lost its last page and is removed.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from .radix_node import RadixNode

FLUSHED: Final = -1


class EvictionHistory:
    """At most `max_count` entries."""

    def __init__(self, max_count: int) -> None:
        self._max_count = max_count
        self._evicted_at: OrderedDict[int, int] = OrderedDict()
        self._last_end_id = 0

    def __len__(self) -> int:
        return len(self._evicted_at)

    def removed(self, node: RadixNode, parent: RadixNode, first_page: bytes, evicted_at: int) -> None:
        """Note that a whole leaf was evicted."""
        if node.truncated_key:
            self._evicted_at.pop(node.truncated_key, None)
        self._set(parent, first_page, evicted_at)

    def truncated(self, node: RadixNode, first_page: bytes, evicted_at: int) -> None:
        """Note that the end of a leaf was evicted, from `first_page` on."""
        # A leaf may be cut many times; no look-up can reach the entry of an earlier cut.
        self._evicted_at.pop(node.truncated_key, None)
        node.end_id = 0
        node.truncated_key = self._set(node, first_page, evicted_at)

    def inserted(self, parent: RadixNode, first_page: bytes) -> None:
        """Note that the page is cached again."""
        place = parent.end_id or parent.namespace
        if place is not None and self._evicted_at:
            self._evicted_at.pop(hash((place, first_page)), None)

    def find(self, place: RadixNode | str, page: bytes) -> int:
        """When a page after a node, or a namespace's first page, was evicted: a count, `FLUSHED`, or 0 if unknown."""
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
