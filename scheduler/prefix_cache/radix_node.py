"""`RadixNode`: a run of cached pages, the edges of the tree around it, and what is known of its use.

`RadixCache` shapes the tree. `lock_ref` is written by its leases, `pin_ref` by `Pins`, `queued` by `EvictionQueue`,
`end_id` and `truncated_key` by `EvictionHistory`; everybody may read all of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..arrays import AnyIntArray


class RadixNode:
    """A run of pages and what follows it.

    Attributes:
        key: the tokens of the run, int32 bytes; empty for a root.
        pages: [n] one page per page of `key`.
        children: first page's bytes -> child.
        parent: None for a root and for a node that has left the tree.
        namespace: set for a root only.
        lock_ref: leases that end here or below.
        pin_ref: pins that end here or below.
        created: logical time at which its pages came.
        last_access: logical time of the last release; nobody asks for it while the node is locked.
        num_uses: requests that have leased it, the one that made it included.
        priority: the highest of those requests.
        queued: in which heaps of the eviction queue an entry for it waits, as bits.
        end_id: names the place where the run ends, once pages went from behind it; 0 until then.
        truncated_key: the entry of the page that was cut off its end last; 0 for none.
    """

    __slots__ = (
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

    @property
    def is_evictable_leaf(self) -> bool:
        """Whether eviction may take pages from its end."""
        return not (self.lock_ref or self.children or self.parent is None)


def path_to_root(node: RadixNode) -> Iterator[RadixNode]:
    """The node, its parent, and so on; the root last."""
    each: RadixNode | None = node
    while each is not None:
        yield each
        each = each.parent
