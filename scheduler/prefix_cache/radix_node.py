"""`RadixNode`: a run of cached pages; `Checkpoints`: the states at the ends of nodes; and the checks of a tree.

`RadixCache` builds the tree and writes `lock_ref`. `Pins` writes `pin_ref`, `Wants` writes `num_wants`,
`EvictionQueue` writes `queued`, `EvictionHistory` writes `end_id` and `truncated_key`. All read every attribute.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator

import numpy as np

from ..arrays import EMPTY, TOKEN_ID_BYTES, AnyIntArray, IntArray
from .base import Lease


class RadixNode:
    """A run of pages, with the runs that follow it as children.

    Attributes:
        key: the tokens of the run, int32 bytes; empty for a root.
        pages: [n] the page ids; page i holds the KV of the i-th page of tokens in `key`.
        children: bytes of the child's first page of tokens -> child.
        parent: None for a root and for a node that has left the tree.
        namespace: set for a root only.
        lock_ref: leases that end here or below; > 0 means locked.
        pin_ref: pins that end here or below.
        num_wants: waiting requests with a match that ends here.
        is_dead: evicted before all others, see `EvictionClass`; written by `RadixCache`, too.
        created: logical time at which its pages were inserted.
        last_access: logical time of the last release; not used while the node is locked.
        used_s: when that was.
        num_uses: requests that have leased it, including the one that inserted it, and without the background.
        priority: the highest priority of those requests.
        queued: bits that say which heaps of the eviction queue have an entry for it.
        end_id: id of the position after the run, given when pages after it are evicted; 0 until then.
        checkpoint: the slot of the state after the run, see `Checkpoints`; 0: it was not kept.
        truncated_key: the eviction history's entry for the page that was last cut off its end; 0 for none.
        num_stored: first pages of the run that a tier has or was given; also if that failed, so it is not tried again.
        page_keys: the keys of the pages for the host, see `TierPages`; empty until pages here or below are evicted.
        in_memory: only requests have used it that forbid to store their prompts.
    """

    __slots__ = (
        "checkpoint",
        "children",
        "created",
        "end_id",
        "in_memory",
        "is_dead",
        "key",
        "last_access",
        "lock_ref",
        "namespace",
        "num_stored",
        "num_uses",
        "num_wants",
        "page_keys",
        "pages",
        "parent",
        "pin_ref",
        "priority",
        "queued",
        "truncated_key",
        "used_s",
    )

    def __init__(
        self,
        key: bytes,
        pages: AnyIntArray,
        parent: RadixNode | None,
        *,
        created: int = 0,
        priority: int = 0,
        namespace: str | None = None,
    ) -> None:
        self.key = key
        self.pages = pages
        self.children: dict[bytes, RadixNode] = {}
        self.parent = parent
        self.namespace = namespace
        self.lock_ref = 0
        self.pin_ref = 0
        self.num_wants = 0
        self.is_dead = False
        self.created = created
        self.last_access = created
        self.used_s = 0.0
        self.num_uses = 0
        self.priority = priority
        self.queued = 0
        self.end_id = 0
        self.truncated_key = 0
        self.checkpoint = 0
        self.num_stored = 0
        self.page_keys: list[bytes] = []
        self.in_memory = False

    @property
    def is_stored(self) -> bool:
        """Whether a tier has the whole run."""
        return self.num_stored == len(self.pages)

    @property
    def is_evictable_leaf(self) -> bool:
        """Whether eviction may take pages from the end of the run."""
        return not (self.lock_ref or self.children or self.parent is None)


def path_to_root(node: RadixNode) -> Iterator[RadixNode]:
    """The node, its parent, and so on; the root last."""
    each: RadixNode | None = node
    while each is not None:
        yield each
        each = each.parent


def prefix_of(node: RadixNode) -> tuple[str, bytes]:
    """Namespace, and tokens (int32 bytes) of the prefix that ends with a node."""
    path = list(path_to_root(node))
    namespace = path.pop().namespace
    assert namespace is not None
    return namespace, b"".join(each.key for each in reversed(path))


class Checkpoints:
    """The states at the ends of radix nodes, for models with state layers, in the order of their last use.

    A state layer's state is exact at one token only, so a prefix can be reused only up to a token at which the state
    was kept. A node's checkpoint is the state after the last token of its run. It goes when that token goes: when the
    node is evicted or cut. It also goes when a newer one needs its slot: the least recently used first.
    """

    def __init__(self, free: Callable[[int], None]) -> None:
        """`free`: takes back the slot of a checkpoint that has left the tree."""
        self._free = free
        self._nodes: OrderedDict[int, RadixNode] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def put(self, node: RadixNode, checkpoint: int) -> None:
        """Give a node its checkpoint; it had none."""
        assert not node.checkpoint, node.checkpoint
        node.checkpoint = checkpoint
        self._nodes[checkpoint] = node

    def used(self, node: RadixNode) -> None:
        """Note that a node's checkpoint was read, or would have been made again."""
        self._nodes.move_to_end(node.checkpoint)

    def unused(self, node: RadixNode) -> None:
        """Note that a node's checkpoint, if it has one, is unlikely to be read: it goes first."""
        if node.checkpoint:
            self._nodes.move_to_end(node.checkpoint, last=False)

    def removed(self, node: RadixNode) -> None:
        """The node has left the tree, or its last token has: free its checkpoint, if it has one."""
        if node.checkpoint:
            self._drop(node)

    def drop_oldest(self, keep: Collection[int]) -> bool:
        """Free the checkpoint that was not used for the longest time, except those in `keep`; False: there is none.

        Those of pinned nodes go when there are no others.
        """
        may_go = (node for checkpoint, node in self._nodes.items() if checkpoint not in keep)
        pinned: RadixNode | None = None
        for node in may_go:
            if not node.pin_ref:
                self._drop(node)
                return True
            pinned = pinned or node
        if pinned is None:
            return False
        self._drop(pinned)
        return True

    def _drop(self, node: RadixNode) -> None:
        del self._nodes[node.checkpoint]
        self._free(node.checkpoint)
        node.checkpoint = 0

    def taken(self) -> list[int]:
        """The slots of all checkpoints; for checks."""
        return list(self._nodes)

    def verify(self, nodes: Iterable[RadixNode]) -> list[str]:
        """Errors found, by all nodes of the tree."""
        in_tree = {node.checkpoint: node for node in nodes if node.checkpoint}
        if in_tree.keys() != self._nodes.keys() or any(
            self._nodes[each] is not in_tree[each] for each in in_tree
        ):
            return [f"the nodes have the checkpoints {sorted(in_tree)}, known are {sorted(self._nodes)}"]
        return [f"a root has checkpoint {each}" for each, node in in_tree.items() if node.parent is None]


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
    roots: Roots,
    leases: Iterable[Lease],
    finds: Callable[[RadixNode], bool],
    page_size: int,
    counts: tuple[int, int],
) -> Iterator[str]:
    """Yield errors of the tree.

    Args:
        roots: the tree, by namespace.
        leases: all leases on the tree.
        finds: whether the eviction queue finds an evictable leaf.
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
        if node.is_evictable_leaf and not finds(node):
            yield "the eviction queue does not find an evictable leaf"
    if (evictable, locked) != counts:
        yield f"evictable and locked pages are counted as {counts}, but are {(evictable, locked)}"
