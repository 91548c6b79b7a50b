"""`Pins`: prefixes that clients asked to keep for a time, within a quota of pages.

A pin covers the path from a root to a node. So every page above a pinned page is pinned, too, and eviction can take all
unpinned pages before it takes a pinned one. A pin is a request to keep pages, not a lock: pinned pages count as
evictable. When pinned pages are evicted, the pin gets shorter; it ends when none is left.

A *promise* is a pin that a request asked for in passing, by a time to live of its prompt. A new one replaces those of
the same tenant at its beginning that end no later. In a full quota, promises of tenants with more than the quota
divided by the tenants make room for a new one; those that end first do so first.

A pin is identified by its namespace and its tokens, a promise also by its tenant. Several pins can cover the same
pages, so the quota also bounds the number of pins: at most as many pins as pages. Otherwise prompts that share one
cached page could make any number of pins.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from .radix_node import RadixNode, path_to_root

PinKey = tuple[str, bytes, str | None]

_DIGEST_BYTES: Final = 16
_MIN_COMPACTION: Final = 64


class Pin:
    """One pinned prefix.

    Attributes:
        key: its namespace, a digest of its tokens, and the tenant of a promise.
        node: the node at which it ends; None after the pin is over.
        until_s: when it expires.
        num_pages: of its path when it began.
    """

    __slots__ = ("key", "node", "num_pages", "until_s")

    def __init__(self, key: PinKey, node: RadixNode, until_s: float) -> None:
        self.key = key
        self.node: RadixNode | None = node
        self.until_s = until_s
        self.num_pages = sum(len(each.pages) for each in path_to_root(node))

    @property
    def tenant(self) -> str | None:
        """The tenant of a promise; None: a client pinned it."""
        return self.key[2]


class Pins:
    """All pins.

    Attributes:
        max_pages: the quota, of pages and of pins.
        num_pages: distinct pages that are pinned.
    """

    def __init__(self, max_pages: int) -> None:
        self.max_pages: Final = max_pages
        self.num_pages = 0
        self._by_key: dict[PinKey, Pin] = {}
        self._by_node: dict[RadixNode, set[Pin]] = {}
        self._expiries: list[tuple[float, int, Pin]] = []
        self._seq = 0

    def __len__(self) -> int:
        return len(self._by_key)

    @staticmethod
    def key_of(extra_key: str, token_ids: bytes, tenant: str | None) -> PinKey:
        """The key of a pin. It has a digest of the tokens, because a prompt may take a megabyte."""
        return extra_key, hashlib.blake2b(token_ids, digest_size=_DIGEST_BYTES).digest(), tenant

    def has_room(self) -> bool:
        """Whether the quota allows one more pin."""
        return len(self._by_key) < self.max_pages

    def begin(self, key: PinKey, node: RadixNode, until_s: float) -> list[RadixNode]:
        """Pin a path; return the nodes that were not pinned before. No pin of this key may exist."""
        assert key not in self._by_key
        pin = self._by_key[key] = Pin(key, node, until_s)
        self._by_node.setdefault(node, set()).add(pin)
        self._seq += 1
        heapq.heappush(self._expiries, (until_s, self._seq, pin))
        changed: list[RadixNode] = []
        for each in path_to_root(node):
            if not each.pin_ref:
                changed.append(each)
                self.num_pages += len(each.pages)
            each.pin_ref += 1
        return changed

    def end(self, key: PinKey) -> list[RadixNode]:
        """End the pin of this key, if there is one; return the nodes that no pin covers any more."""
        pin = self._by_key.get(key)
        return self._end(pin) if pin is not None else []

    def end_covered(self, node: RadixNode, tenant: str, until_s: float) -> list[RadixNode]:
        """End the tenant's promises at a node and above it that last no longer than a new one at this node."""
        changed: list[RadixNode] = []
        for each in path_to_root(node):
            for pin in tuple(self._by_node.get(each, ())):
                if pin.tenant == tenant and pin.until_s <= until_s:
                    changed += self._end(pin)
        return changed

    def end_promises_at(self, node: RadixNode, tenant: str) -> list[RadixNode]:
        """End the tenant's promises that end at a node; return as `end`."""
        pins = [pin for pin in self._by_node.get(node, ()) if pin.tenant == tenant]
        return [changed for pin in pins for changed in self._end(pin)]

    def make_room(self, num_pages: int, tenant: str) -> list[RadixNode]:
        """End promises until a new one of `num_pages` pages has room, as the module says; return as `end`."""
        promises = [pin for pin in self._by_key.values() if pin.tenant is not None]
        sizes = Counter[str | None]()
        for pin in promises:
            sizes[pin.tenant] += pin.num_pages
        share = self.max_pages // len(sizes.keys() | {tenant})
        changed: list[RadixNode] = []
        for pin in sorted(promises, key=lambda pin: pin.until_s):
            if self.has_room() and self.max_pages - self.num_pages >= min(num_pages, share):
                break
            if sizes[pin.tenant] + num_pages * (pin.tenant == tenant) > share:
                sizes[pin.tenant] -= pin.num_pages
                changed += self._end(pin)
        return changed

    def expire(self, now_s: float) -> list[RadixNode]:
        """End the expired pins; return the nodes that no pin covers any more."""
        changed: list[RadixNode] = []
        while self._expiries and self._expiries[0][0] <= now_s:
            pin = heapq.heappop(self._expiries)[2]
            if pin.node is not None:
                changed += self._end(pin)
        return changed

    def truncated(self, num_pages: int) -> None:
        """Note that the end of a pinned leaf was evicted. Its pins cover the rest of the leaf."""
        self.num_pages -= num_pages

    def removed(self, node: RadixNode, parent: RadixNode) -> None:
        """Note that a pinned leaf leaves the tree. Pins that ended there now end at its parent."""
        self.num_pages -= len(node.pages)
        node.pin_ref = 0
        pins = self._by_node.pop(node)
        for pin in pins:
            pin.node = parent
        self._by_node.setdefault(parent, set()).update(pins)
        if parent.parent is None:  # the parent is a root, so the pins cover no page any more
            for pin in pins:
                self._end(pin)

    def _end(self, pin: Pin) -> list[RadixNode]:
        node = pin.node
        assert node is not None
        pin.node = None
        del self._by_key[pin.key]
        pins = self._by_node[node]
        pins.remove(pin)
        if not pins:
            del self._by_node[node]
        changed: list[RadixNode] = []
        for each in path_to_root(node):
            each.pin_ref -= 1
            if not each.pin_ref:
                changed.append(each)
                self.num_pages -= len(each.pages)
        if len(self._expiries) > 2 * len(self._by_key) + _MIN_COMPACTION:  # many were renewed or ended early
            self._expiries = [entry for entry in self._expiries if entry[2].node is not None]
            heapq.heapify(self._expiries)
        return changed

    def verify(self, nodes: Iterable[RadixNode]) -> Iterator[str]:
        """Yield errors: wrong counters, pinned nodes without a pin, pins whose nodes are not pinned."""
        covers: dict[RadixNode, int] = {}
        for node, pins in self._by_node.items():
            if any(pin.node is not node or self._by_key.get(pin.key) is not pin for pin in pins):
                yield "a pin is stored under the wrong node or key"
            for each in path_to_root(node):
                covers[each] = covers.get(each, 0) + len(pins)
        num_pages = 0
        for node in nodes:
            if node.pin_ref != covers.pop(node, 0):
                yield f"a node counts {node.pin_ref} pins, but another number of pins ends there or below"
            if node.pin_ref:
                num_pages += len(node.pages)
        if covers:
            yield f"{len(covers)} nodes have pins, but are not in the tree"
        if num_pages != self.num_pages:
            yield f"pinned pages are counted as {self.num_pages}, but are {num_pages}"
        if num_pages > self.max_pages or len(self._by_key) > self.max_pages:
            yield f"{num_pages} pages have {len(self._by_key)} pins, the quota is {self.max_pages} of each"
