"""`RadixNode`: a run of cached pages, its edges in the tree, and counters of its use.

`RadixCache` builds the tree and writes `lock_ref`. `Pins` writes `pin_ref`, `EvictionQueue` writes `queued`,
`EvictionHistory` writes `end_id` and `truncated_key`. All of them read every attribute.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..arrays import AnyIntArray


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
        created: logical time at which its pages were inserted.
        last_access: logical time of the last release; not used while the node is locked.
        num_uses: requests that have leased it, including the one that inserted it.
        priority: the highest priority of those requests.
        queued: bits that say which heaps of the eviction queue have an entry for it.
        end_id: id of the position after the run, given when pages after it are evicted; 0 until then.
        checkpoint: the slot of the state after the run, see `Checkpoints`; 0: it was not kept.
        truncated_key: the eviction history's entry for the page that was last cut off its end; 0 for none.
    """

    __slots__ = (
        "checkpoint",
        "children",
        "created",
        "end_id",
        "key",
        "last_access",
        "lock_ref",
        "namespace",
        "num_uses",
        "pages",
        "parent",
        "pin_ref",
        "priority",
        "queued",
        "truncated_key",
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
        self.created = created
        self.last_access = created
        self.num_uses = 0
        self.priority = priority
        self.queued = 0
        self.end_id = 0
        self.truncated_key = 0
        self.checkpoint = 0

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
