"""`PrefixCache`: what the scheduler needs of a store of computed prefixes; `NoPrefixCache`: the one that keeps none.

Ownership of pages is the whole point of this interface:

- A request *leases* a prefix. Leased pages belong to the cache, cannot be evicted, and may be leased by many.
- `extend` offers the request's own next pages to the cache. What it returns stands for those positions from now on.
  Where that is the page offered, the cache owns the page now; where it is another one, somebody was faster, and the
  request still owns its copy and has to free it. What is not returned stays the request's.
- `release` ends the lease. The pages stay, unlocked, until `evict` hands them out. `forget` ends it where the KV may be
  bad: what no other request uses is handed out at once.

So each page has one owner at any time, and a request that ends frees exactly the pages beyond its lease.

A *pin* is a wish of a client to keep a prefix for a time. It changes no ownership and blocks nobody: pinned pages stay
evictable and count as such, they are only the last to go, and when they go the pin goes with them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from ..arrays import EMPTY, TOKEN_ID_BYTES, AnyIntArray, IntArray
from ..records.cache_miss import CacheMiss, MissKind


def namespace_of(cache_salt: str, lora_id: str) -> str:
    """The namespace of requests with this salt and adapter; two different pairs never have the same.

    Both are arbitrary strings of clients, so no separator would do: the length says where the adapter's name ends.
    Without both it is the empty string, which no pair with one of them gives.
    """
    return f"{len(lora_id)}:{lora_id}{cache_salt}" if cache_salt or lora_id else ""


class PrefixMatch(NamedTuple):
    """A cached prefix of a request, found but not locked; good until the cache's `generation` changes.

    Attributes:
        num_pages: how long it is.
        node: where it ends; only the cache looks at it.
        pages_in_node: how many pages of `node` belong to it.
    """

    num_pages: int = 0
    node: Any = None
    pages_in_node: int = 0


class Prefix(NamedTuple):
    """What a request would start with if it were admitted now.

    Attributes:
        match: the pages that the prefix cache has; they are leased and take no new memory.
        ready_len: tokens that need not be computed. Equal to the match's tokens, or more: the KV behind the match comes
            back from the host, or is copied from a sibling's last page; it takes new pages, but no computing.
    """

    match: PrefixMatch
    ready_len: int


class Lease:
    """A lock of one request on a cached prefix.

    Attributes:
        extra_key: the namespace.
        num_pages: length of the prefix.
        node: where it ends; only the cache looks at it.
        priority: of the request.
    """

    __slots__ = ("extra_key", "node", "num_pages", "priority")

    def __init__(self, extra_key: str, num_pages: int, node: Any, priority: int = 0) -> None:
        self.extra_key = extra_key
        self.num_pages = num_pages
        self.node = node
        self.priority = priority


class PrefixCache(Protocol):
    """A store of computed prefixes in whole pages, divided into namespaces.

    Token ids come as int32 bytes; a trailing part that fills no page is ignored.
    """

    @property
    def shares(self) -> bool:
        """Whether anything is kept at all."""
        ...

    @property
    def generation(self) -> int:
        """Changes whenever an earlier `PrefixMatch` may have become wrong or too short."""
        ...

    @property
    def evictable_pages(self) -> int:
        """Pages that `evict` could free."""
        ...

    @property
    def locked_pages(self) -> int:
        """Pages under a lease."""
        ...

    @property
    def pinned_pages(self) -> int:
        """Distinct pages under a pin, leased or not."""
        ...

    @property
    def num_pins(self) -> int:
        """How many there are; at most as many as pages of the quota."""
        ...

    def match(self, extra_key: str, token_ids: bytes, max_pages: int) -> PrefixMatch:
        """The longest cached prefix of at most `max_pages`. Changes nothing."""
        ...

    def unlocked_pages(self, match: PrefixMatch) -> int:
        """How many pages of the match would stop being evictable if it were locked."""
        ...

    def lock(self, extra_key: str, match: PrefixMatch, priority: int = 0) -> Lease:
        """Lease a match that is still good, for a request of this priority."""
        ...

    def pages_of(self, lease: Lease) -> IntArray:
        """[lease.num_pages] the leased pages, first to last."""
        ...

    def extend(self, lease: Lease, token_ids: bytes, pages: AnyIntArray) -> AnyIntArray:
        """Make the lease longer; see the module's text.

        Args:
            lease: grows by the pages returned.
            token_ids: int32 bytes of the tokens that follow the leased ones.
            pages: [n] the request's pages with their KV; `token_ids` has n pages.

        Returns:
            [n] or, if nothing is kept, [0]: the cache's pages for these tokens.
        """
        ...

    def release(self, lease: Lease) -> None:
        """End a lease."""
        ...

    def forget(self, lease: Lease) -> IntArray:
        """End a lease and drop the end of its prefix, as far as nobody else leases or has extended it.

        Returns:
            the dropped pages; nobody owns them.
        """
        ...

    def evict(self, num_pages: int, *, spare_pins: bool = False) -> IntArray:
        """Forget the least valuable unlocked pages, at most `num_pages`, and hand them over.

        Pinned ones go when no others are left, or not at all (`spare_pins`).
        """
        ...

    def flush(self) -> IntArray:
        """Forget all that is not leased, pins included, and hand it over."""
        ...

    def pin(self, extra_key: str, token_ids: bytes, until_s: float) -> int:
        """Keep what is cached of a prefix *now* until a time, as far as the quota goes, its beginning first.

        Pages that come later are not covered; to cover them, pin again. That also sets the new time, which may be
        earlier. Whoever calls sees to it that nobody pins for ever.

        Returns:
            pages of the prefix that this pin covers.
        """
        ...

    def unpin(self, extra_key: str, token_ids: bytes) -> None:
        """End the pin that was made with the same arguments, if it is still there."""
        ...

    def expire_pins(self, now_s: float) -> None:
        """End the pins whose time has come. For each pass: costs nothing while there are none."""
        ...

    def explain(self, extra_key: str, token_ids: bytes, match: PrefixMatch, rid: str) -> CacheMiss:
        """Why a match that is still good (so: before it is locked) is not longer.

        Args:
            token_ids: the whole prompt that was looked up with all but its last token allowed to match.
        """
        ...

    def verify(self, leases: Iterable[Lease]) -> list[str]:
        """What is wrong inside: counters, locks without lease, leases without lock. Costs a walk over everything."""
        ...

    def all_pages(self) -> IntArray:
        """Every page the cache owns; for checks."""
        ...


class NoPrefixCache:
    """Keeps nothing: requests own all their pages and free them when they end."""

    __slots__ = ()

    shares = False
    generation = 0
    evictable_pages = 0
    locked_pages = 0
    pinned_pages = 0
    num_pins = 0

    def match(self, extra_key: str, token_ids: bytes, max_pages: int) -> PrefixMatch:
        return PrefixMatch()

    def unlocked_pages(self, match: PrefixMatch) -> int:
        return 0

    def lock(self, extra_key: str, match: PrefixMatch, priority: int = 0) -> Lease:
        return Lease(extra_key, 0, None, priority)

    def pages_of(self, lease: Lease) -> IntArray:
        return EMPTY

    def extend(self, lease: Lease, token_ids: bytes, pages: AnyIntArray) -> AnyIntArray:
        return EMPTY

    def release(self, lease: Lease) -> None:
        pass

    def forget(self, lease: Lease) -> IntArray:
        return EMPTY

    def evict(self, num_pages: int, *, spare_pins: bool = False) -> IntArray:
        return EMPTY

    def flush(self) -> IntArray:
        return EMPTY

    def pin(self, extra_key: str, token_ids: bytes, until_s: float) -> int:
        return 0

    def unpin(self, extra_key: str, token_ids: bytes) -> None:
        pass

    def expire_pins(self, now_s: float) -> None:
        pass

    def explain(self, extra_key: str, token_ids: bytes, match: PrefixMatch, rid: str) -> CacheMiss:
        return CacheMiss(rid, len(token_ids) // TOKEN_ID_BYTES, 0, MissKind.OFF, 0)

    def verify(self, leases: Iterable[Lease]) -> list[str]:
        return []

    def all_pages(self) -> IntArray:
        return EMPTY
