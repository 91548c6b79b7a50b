"""`TierPages`: which pages of the tree's nodes a tier has, and what tiers are given before it is evicted.

The tier of `scheduler/tiers/` is a disk or a store: `RadixNode.num_stored` counts the first pages of a node's run that
it has. The host has pages that were evicted (`scheduler/memory/host_pages.py`), by their keys: `page_keys`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from typing import Final

from ..arrays import TOKEN_ID_BYTES, IntArray
from .eviction import EvictionQueue
from .radix_node import RadixNode, path_to_root, prefix_of

DIGEST_BYTES: Final = 32

CopyOut = Callable[[list[bytes], IntArray], None]
"""Takes pages that are being evicted: their keys, and [n] their ids."""


def digest_of(data: bytes) -> bytes:
    """[DIGEST_BYTES] the digest of which keys are made."""
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def root_key(identity: bytes, namespace: str) -> bytes:
    """The key before the first page of a namespace of the prefix cache; adapters are in it by their content."""
    return digest_of(identity + namespace.encode(errors="surrogatepass"))


def page_keys(
    root: bytes, token_ids: bytes, page_size: int, portable: Callable[[bytes], bytes] = bytes
) -> Iterator[bytes]:
    """The keys of a prompt's pages, each of all tokens up to its end; about 1 us a page.

    Args:
        root: `root_key`.
        token_ids: [n * page_size] int32.
        portable: what is hashed for the tokens of a page, if keys leave the process: `MediaIds.portable`.
    """
    key, page_bytes = root, page_size * TOKEN_ID_BYTES
    for begin in range(0, len(token_ids), page_bytes):
        key = digest_of(key + portable(token_ids[begin : begin + page_bytes]))
        yield key


class TierPages:
    """See the module."""

    def __init__(
        self, queue: EvictionQueue, page_size: int, stored_window_pages: int, copy_out: CopyOut | None
    ) -> None:
        """Take the queue.

        Args:
            queue: the order of eviction.
            page_size: tokens per page.
            stored_window_pages: of so many pages that are evicted next, those that a tier has go first.
            copy_out: of the host; None: it keeps nothing.
        """
        self._queue: Final = queue
        self._page_size: Final = page_size
        self._window_pages: Final = stored_window_pages
        self._copy_out: Final = copy_out

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

    def evicted(self, leaf: RadixNode, num_kept: int) -> None:
        """The pages of a leaf's run after the first `num_kept` are evicted: the host takes what may be used again."""
        if self._copy_out is not None and not leaf.is_dead:
            self._copy_out(self._keys(leaf)[num_kept:], leaf.pages[num_kept:])

    def _keys(self, node: RadixNode) -> list[bytes]:
        """The keys of a node's pages, which each node keeps; about 1 us for each page that has none yet."""
        lacking: list[RadixNode] = []
        each = node
        while each.parent is not None and len(each.page_keys) < len(each.pages):
            lacking.append(each)
            each = each.parent
        key = each.page_keys[-1] if each.namespace is None else root_key(b"", each.namespace)
        while lacking:
            each = lacking.pop()
            each.page_keys = list(page_keys(key, each.key, self._page_size))
            key = each.page_keys[-1]
        return node.page_keys

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """`lower` was split; `upper` has the beginning of its run."""
        upper.num_stored = min(lower.num_stored, len(upper.pages))
        lower.num_stored -= upper.num_stored
        upper.page_keys, lower.page_keys = (
            lower.page_keys[: len(upper.pages)],
            lower.page_keys[len(upper.pages) :],
        )

    def truncated(self, node: RadixNode) -> None:
        """The end of a leaf's run was cut off."""
        node.num_stored = min(node.num_stored, len(node.pages))
        del node.page_keys[len(node.pages) :]
