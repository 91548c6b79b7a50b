"""`RadixCache`: computed prefixes in a tree, so that equal beginnings are stored and computed once.

Each edge holds a run of whole pages; a node's children differ in their first page, and a dictionary keyed by that
page's bytes finds the right one. Keys are bytes: comparing 8,192 tokens is one memcmp. Each namespace (`extra_key`) has
its own root, so equal tokens under another adapter or salt can never meet.

    root ── "You are a helpful" ─┬─ "assistant. What is" ── ...        lock_ref counts the leases that end at a node
                                 └─ "pirate. Where"                    or below it: > 0 means locked

Idea: SGLang's RadixAttention (sglang:mem_cache/radix_cache.py). Different here: a look-up never splits a node, leases
extend from where they end instead of from the root, and eviction takes pages from the end of the oldest leaf instead of
the whole leaf, so that one short request does not cost a long prefix.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from .arrays import EMPTY, AnyIntArray, IntArray
from .prefix_cache import Lease, PrefixMatch
from .req import TOKEN_ID_BYTES


class RadixNode:
    """A run of pages and what follows it.

    Attributes:
        key: the tokens of the run, int32 bytes; empty for a root.
        pages: [n] one page per page of `key`.
        children: first page's bytes -> child.
        parent: None for a root and for a node that has left the tree.
        lock_ref: leases that end here or below.
        last_access: logical time of the last release; nobody asks for it while the node is locked.
        in_heap: whether an entry for it waits in the eviction heap (at most one does).
        namespace: set for a root only.
    """

    __slots__ = ("children", "in_heap", "key", "last_access", "lock_ref", "namespace", "pages", "parent")

    def __init__(
        self, key: bytes, pages: AnyIntArray, parent: RadixNode | None, namespace: str | None = None
    ) -> None:
        self.key = key
        self.pages = pages
        self.children: dict[bytes, RadixNode] = {}
        self.parent = parent
        self.lock_ref = 0
        self.last_access = 0
        self.in_heap = False
        self.namespace = namespace


class RadixCache:
    """See the module; the contract is `PrefixCache`."""

    __slots__ = (
        "_clock",
        "_evictable_pages",
        "_generation",
        "_heap",
        "_heap_seq",
        "_locked_pages",
        "_page_bytes",
        "_roots",
        "page_size",
    )

    def __init__(self, page_size: int) -> None:
        self.page_size: Final = page_size
        self._page_bytes = page_size * TOKEN_ID_BYTES
        self._roots: dict[str, RadixNode] = {}
        self._evictable_pages = 0
        self._locked_pages = 0
        self._generation = 0
        self._clock = 0
        self._heap: list[tuple[int, int, RadixNode]] = []
        self._heap_seq = 0

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def evictable_pages(self) -> int:
        return self._evictable_pages

    @property
    def locked_pages(self) -> int:
        return self._locked_pages

    # ------------------------------------------------------------ look-up and locks

    def match(self, extra_key: str, token_ids: bytes, max_pages: int) -> PrefixMatch:
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

    def lock(self, extra_key: str, match: PrefixMatch) -> Lease:
        node: RadixNode | None = match.node
        if node is None:
            node = self._root(extra_key)
        if match.pages_in_node < len(node.pages):
            node = self._split(node, match.pages_in_node)
        self._lock_path(node, None)
        return Lease(extra_key, match.num_pages, node)

    def pages_of(self, lease: Lease) -> IntArray:
        runs = [node.pages for node in _path(lease.node)]
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
                child = RadixNode(token_ids[offset:], pages[offset // page_bytes :].copy(), node)
                node.children[first_page] = child
                self._evictable_pages += len(child.pages)  # until it is locked, a few lines below
                self._generation += 1
            elif not token_ids.startswith(child.key, offset):
                child = self._split(child, self._common_pages(child.key, token_ids, offset, end))
            kept.append(child.pages)
            offset += len(child.key)
            node = child
        self._lock_path(node, lease.node)
        lease.node = node
        lease.num_pages += len(pages)
        return np.concatenate(kept) if kept else EMPTY

    def release(self, lease: Lease) -> None:
        self._clock += 1
        for node in _path(lease.node):
            node.lock_ref -= 1
            node.last_access = self._clock
            if not node.lock_ref:
                self._locked_pages -= len(node.pages)
                self._evictable_pages += len(node.pages)
                self._note_if_evictable(node)
        lease.node = None
        lease.num_pages = 0

    def forget(self, lease: Lease) -> IntArray:
        node: RadixNode | None = lease.node
        self.release(lease)
        dropped: list[AnyIntArray] = []
        while node is not None and node.parent is not None and not (node.lock_ref or node.children):
            parent = node.parent
            dropped.append(node.pages)
            self._evictable_pages -= len(node.pages)
            self._remove(node)
            node = parent
        if not dropped:
            return EMPTY
        self._generation += 1
        return np.concatenate(dropped)

    # ------------------------------------------------------------ eviction

    def evict(self, num_pages: int) -> IntArray:
        freed: list[AnyIntArray] = []
        missing = num_pages
        while missing > 0 and self._heap:
            access, _, node = heapq.heappop(self._heap)
            node.in_heap = False
            if node.lock_ref or node.children or node.parent is None:
                continue  # it is noted again when its lock or its last child goes
            if node.last_access != access:
                self._note_if_evictable(node)  # used since the entry was made: back with its new age
                continue
            keep = max(0, len(node.pages) - missing)
            taken = node.pages[keep:]
            freed.append(taken)
            missing -= len(taken)
            self._evictable_pages -= len(taken)
            if keep:
                node.pages = node.pages[:keep].copy()
                node.key = node.key[: keep * self._page_bytes]
                self._note_if_evictable(node)
            else:
                self._remove(node)
        if not freed:
            return EMPTY
        self._generation += 1
        return np.concatenate(freed)

    def _note_if_evictable(self, node: RadixNode) -> None:
        if node.lock_ref or node.children:
            return
        if node.parent is None:
            if (
                node.namespace is not None
            ):  # an empty root: namespaces come from clients, so they must not pile up
                del self._roots[node.namespace]
                node.namespace = None
                self._generation += 1
        elif not node.in_heap:
            node.in_heap = True
            self._heap_seq += 1
            heapq.heappush(self._heap, (node.last_access, self._heap_seq, node))

    def _remove(self, node: RadixNode) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key[: self._page_bytes]]
        node.parent = None
        self._note_if_evictable(parent)

    # ------------------------------------------------------------ structure

    def _root(self, extra_key: str) -> RadixNode:
        root = self._roots.get(extra_key)
        if root is None:
            root = self._roots[extra_key] = RadixNode(b"", EMPTY, None, extra_key)
            self._generation += 1
        return root

    def _split(self, node: RadixNode, num_pages: int) -> RadixNode:
        """Cut a node after `num_pages`; returns the new upper part. Leases end at the lower: the old object."""
        assert 0 < num_pages < len(node.pages) and node.parent is not None
        cut = num_pages * self._page_bytes
        upper = RadixNode(node.key[:cut], node.pages[:num_pages].copy(), node.parent)
        upper.lock_ref = node.lock_ref
        node.parent.children[node.key[: self._page_bytes]] = upper
        node.key = node.key[cut:]
        node.pages = node.pages[num_pages:].copy()
        node.parent = upper
        upper.children[node.key[: self._page_bytes]] = node
        self._generation += 1
        return upper

    def _lock_path(self, node: RadixNode, stop: RadixNode | None) -> None:
        """Count one more lease on `node` and all above it, up to but without `stop`, which has counted it already."""
        for each in _path(node):
            if each is stop:
                break
            if not each.lock_ref:
                self._evictable_pages -= len(each.pages)
                self._locked_pages += len(each.pages)
            each.lock_ref += 1

    def _common_pages(self, key: bytes, token_ids: bytes, offset: int, end: int) -> int:
        count = min(len(key), end - offset) // TOKEN_ID_BYTES
        ours = np.frombuffer(key, dtype=np.int32, count=count)
        theirs = np.frombuffer(token_ids, dtype=np.int32, count=count, offset=offset)
        different = ours != theirs
        first = int(different.argmax()) if different.any() else count
        return first // self.page_size

    # ------------------------------------------------------------ checks

    def all_pages(self) -> IntArray:
        runs = [node.pages for node in self._nodes()]
        return np.concatenate(runs) if runs else EMPTY

    def verify(self, leases: Iterable[Lease]) -> list[str]:
        wrong: list[str] = []
        owners: dict[int, int] = {}
        for lease in leases:
            length = 0
            for node in _path(lease.node):
                owners[id(node)] = owners.get(id(node), 0) + 1
                length += len(node.pages)
            if length != lease.num_pages:
                wrong.append(f"a lease says {lease.num_pages} pages, its path has {length}")
        evictable = locked = 0
        for node in self._nodes():
            if node.lock_ref != owners.get(id(node), 0):
                wrong.append(f"a node has {node.lock_ref} locks and {owners.get(id(node), 0)} owners")
            if len(node.key) != len(node.pages) * self._page_bytes:
                wrong.append(f"a node has {len(node.key)} key bytes for {len(node.pages)} pages")
            for first_page, child in node.children.items():
                if child.parent is not node or not child.key.startswith(first_page):
                    wrong.append("a child is filed under the wrong page or parent")
            if node.lock_ref:
                locked += len(node.pages)
            else:
                evictable += len(node.pages)
                if node.parent is not None and not node.children and not node.in_heap:
                    wrong.append("an evictable leaf that eviction would not find")
        if (evictable, locked) != (self._evictable_pages, self._locked_pages):
            wrong.append(
                f"evictable and locked pages are counted as {self._evictable_pages} and {self._locked_pages}, "
                f"but are {evictable} and {locked}"
            )
        return wrong

    def _nodes(self) -> Iterator[RadixNode]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _path(node: RadixNode) -> Iterator[RadixNode]:
    """From a node up to its root."""
    each: RadixNode | None = node
    while each is not None:
        yield each
        each = each.parent
