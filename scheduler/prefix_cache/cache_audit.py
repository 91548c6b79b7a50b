"""Checks of a `RadixCache`'s tree, node by node; for tests, and for checks of an idle scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from ..arrays import EMPTY, TOKEN_ID_BYTES, IntArray
from .base import Lease
from .eviction import EvictionQueue
from .radix_node import RadixNode, path_to_root

Roots = dict[str, RadixNode]


def nodes_of(roots: Roots) -> Iterator[RadixNode]:
    """All nodes, including the roots, in no particular order."""
    stack = list(roots.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def pages_in(roots: Roots) -> IntArray:
    """[n] the page ids of all nodes."""
    runs = [node.pages for node in nodes_of(roots)]
    return np.concatenate(runs) if runs else EMPTY


def verify_nodes(
    roots: Roots, leases: Iterable[Lease], queue: EvictionQueue, page_size: int, counts: tuple[int, int]
) -> Iterator[str]:
    """Yield errors of the tree.

    Args:
        roots: the tree, by namespace.
        leases: all leases on the tree.
        queue: the eviction queue, which must find every evictable leaf.
        page_size: tokens per page.
        counts: (evictable, locked) pages, as the cache counts them.
    """
    owners: dict[int, int] = {}
    for lease in leases:
        length = 0
        for node in path_to_root(lease.node):
            owners[id(node)] = owners.get(id(node), 0) + 1
            length += len(node.pages)
        if length != lease.num_pages:
            yield f"a lease has {lease.num_pages} pages, its path has {length}"
    evictable = locked = 0
    for node in nodes_of(roots):
        if node.lock_ref:
            locked += len(node.pages)
        else:
            evictable += len(node.pages)
        if node.lock_ref != owners.get(id(node), 0):
            yield f"a node has {node.lock_ref} locks and {owners.get(id(node), 0)} owners"
        if len(node.key) != len(node.pages) * page_size * TOKEN_ID_BYTES:
            yield f"a node has {len(node.key)} key bytes for {len(node.pages)} pages"
        for first_page, child in node.children.items():
            if child.parent is not node or not child.key.startswith(first_page):
                yield "a child is stored under the wrong page or parent"
        if node.is_evictable_leaf and not queue.finds(node):
            yield "the eviction queue does not find an evictable leaf"
    if (evictable, locked) != counts:
        yield f"evictable and locked pages are counted as {counts}, but are {(evictable, locked)}"
