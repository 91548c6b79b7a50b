"""`PrefixCache`: the interface of the cache of computed prefixes, and the cache that keeps none.

The interface defines who owns a page:

- `lock`: a request *leases* a prefix. The cache owns leased pages. They cannot be evicted. Several requests can lease
  the same pages.
- `extend`: a request offers its next pages to the cache. The cache returns the pages for those positions. Where it
  returns the offered page, the cache owns that page now. Where it returns another one, it already had the same tokens:
  the request uses the cache's page and must free its own copy. Pages without a returned page stay with the request.
- `release`: ends the lease. The pages stay in the cache, unlocked, until `evict` returns them.
- `forget`: ends the lease of a request whose KV may be bad. Pages that no other request uses are returned at once.

So each page has one owner at any time, and a request that ends frees exactly the pages after its lease.

A *pin* is a client's order to keep a prefix for a time. It changes no ownership and blocks no request: pinned pages
count as evictable and are evicted last. A pin ends when its pages are evicted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ...runtime.scheduler_report import HistogramCounts
from ..arrays import EMPTY, TOKEN_ID_BYTES, AnyIntArray, IntArray
from ..records.verdict import CacheMiss, MissKind


def namespace_of(cache_salt: str, lora_id: str) -> str:
    """The namespace of requests with this salt and adapter. Different pairs have different namespaces.

    Clients choose both strings, so a separator could occur in them. Instead, the length of the adapter's name precedes
    it. The namespace is empty if and only if both strings are empty.
    """
    return f"{len(lora_id)}:{lora_id}{cache_salt}" if cache_salt or lora_id else ""


def split_namespace(namespace: str) -> tuple[str, str]:
    """The salt and the adapter of a namespace: the inverse of `namespace_of`."""
    length, _, both = namespace.partition(":")
    end = int(length or 0)
    return both[end:], both[:end]


class PrefixMatch(NamedTuple):
    """A cached prefix of a request that is not locked. It is valid until the cache's `generation` changes.

    Attributes:
        num_pages: length of the prefix.
        node: the node in which it ends; only the cache uses it.
        pages_in_node: number of pages of `node` that belong to it.
        checkpoint: the state after the prefix, in a model with state layers; 0: there are none, or there is no prefix.
        num_known: pages that the cache has, also those without a later checkpoint; only with state layers.
    """

    num_pages: int = 0
    node: Any = None
    pages_in_node: int = 0
    checkpoint: int = 0
    num_known: int = 0


class Prefix(NamedTuple):
    """The KV that a request starts with if it is admitted now.

    Attributes:
        match: the pages of the prefix cache. They are leased and take no new memory.
        ready_len: tokens that need not be computed: those of the match, or more. The KV after the match is copied from
            the host, or from the last prompt page of a sibling. It takes new pages, but is not computed.
        num_host_pages: pages that are copied from the host.
    """

    match: PrefixMatch
    ready_len: int
    num_host_pages: int = 0


class Lease:
    """A lock of one request on a cached prefix.

    Attributes:
        extra_key: the namespace.
        num_pages: length of the prefix.
        node: the node at which it ends; only the cache uses it.
        priority: of the request.
        is_use: whether it counts as a use of its pages, for the order of eviction; not if they are only copied.
        in_memory: the pages of the request must not go to a tier.
        background: the request is of the background class, which keeps no page from being evicted first.
    """

    __slots__ = ("background", "extra_key", "in_memory", "is_use", "node", "num_pages", "priority")

    def __init__(
        self,
        extra_key: str,
        num_pages: int,
        node: Any,
        priority: int = 0,
        *,
        is_use: bool = True,
        in_memory: bool = False,
        background: bool = False,
    ) -> None:
        self.is_use = is_use
        self.background = background
        self.in_memory = in_memory
        self.extra_key = extra_key
        self.num_pages = num_pages
        self.node = node
        self.priority = priority


class Session:
    """One session: what clients say belongs together, such as the conversations of one agent and its subagents.

    Attributes:
        key: a digest, see `GenerateRequest`.
        tenant: of its last turn.
        num_turns: requests so far; parallel samples count once.
        last_s: when the last one arrived.
        group: of the last one.
        ends: the nodes at which its conversations end, the oldest first; only the cache uses them.
        closed: its client has ended it; the pages of turns that still run go first when they end.
    """

    __slots__ = ("closed", "ends", "group", "key", "last_s", "num_turns", "tenant")

    def __init__(self, key: str) -> None:
        self.key = key
        self.tenant = self.group = ""
        self.num_turns = 0
        self.last_s = 0.0
        self.ends: dict[Any, None] = {}
        self.closed = False


class PrefixCache:
    """A cache of computed prefixes in whole pages, divided into namespaces. This base keeps none.

    Token ids are int32 bytes. Trailing tokens that do not fill a page are ignored.
    """

    __slots__ = ()

    @property
    def shares(self) -> bool:
        """Whether prefixes are kept."""
        return False

    @property
    def generation(self) -> int:
        """A number that changes whenever an earlier `PrefixMatch` may have become wrong or too short."""
        return 0

    @property
    def evictable_pages(self) -> int:
        """Pages that `evict` can return."""
        return 0

    @property
    def locked_pages(self) -> int:
        """Pages under a lease."""
        return 0

    @property
    def pinned_pages(self) -> int:
        """Distinct pages under a pin, leased or not."""
        return 0

    @property
    def num_pins(self) -> int:
        """Number of pins; at most the number of pages of the quota."""
        return 0

    def match(self, extra_key: str, token_ids: bytes, max_pages: int) -> PrefixMatch:
        """The longest cached prefix of at most `max_pages` pages, with state layers up to a checkpoint.

        Changes nothing.
        """
        return PrefixMatch()

    def unlocked_pages(self, match: PrefixMatch) -> int:
        """Number of evictable pages that become locked if the match is locked."""
        return 0

    def lock(
        self,
        extra_key: str,
        match: PrefixMatch,
        priority: int = 0,
        *,
        is_use: bool = True,
        in_memory: bool = False,
        background: bool = False,
    ) -> Lease:
        """Lease a match that is still valid, for a request of this priority; the flags: see `Lease`."""
        return Lease(extra_key, 0, None, priority, is_use=is_use, in_memory=in_memory, background=background)

    def pages_of(self, lease: Lease) -> IntArray:
        """[lease.num_pages] the leased pages, in order."""
        return EMPTY

    def extend(self, lease: Lease, token_ids: bytes, pages: AnyIntArray) -> AnyIntArray:
        """Offer pages to the cache and extend the lease by them; see the module.

        Args:
            lease: grows by the returned pages.
            token_ids: int32 bytes of the n pages of tokens that follow the leased ones.
            pages: [n] the request's pages that hold their KV.

        Returns:
            [n] the cache's pages for these tokens; [0] if the cache keeps none.
        """
        return EMPTY

    def keep_state(self, lease: Lease, num_pages: int, checkpoint: int) -> bool:
        """Offer the state after the first `num_pages` pages of a lease; False: the cache does not keep it."""
        return False

    @property
    def num_checkpoints(self) -> int:
        """States that the cache keeps."""
        return 0

    def checkpoints(self) -> list[int]:
        """Their slots; for checks."""
        return []

    def release(self, lease: Lease, *, once: bool = False, session: Session | None = None) -> None:
        """End a lease.

        Args:
            once: it is unlikely to be repeated, so pages that no other lease used are evicted first; those of the
                background do not count.
            session: a conversation of this session ends here; it continues those of the session that end above.
        """

    def forget(self, lease: Lease) -> IntArray:
        """End a lease and drop the end of its prefix: the nodes that no other lease covers and no node follows.

        Returns:
            the dropped pages, which have no owner.
        """
        return EMPTY

    def evict(self, num_pages: int, *, to_host: bool = False) -> IntArray:
        """Drop at most `num_pages` unlocked pages, those of the lowest rank first, and return them.

        The prefixes of waiting requests are dropped when no others are left, and pinned pages after those.

        Args:
            num_pages: to be dropped.
            to_host: the host may copy them in the next step, if it keeps evicted pages.
        """
        return EMPTY

    def take_unstored(self, num_pages: int, min_pages: int) -> list[tuple[str, bytes]]:
        """The prefixes that are evicted next, so many pages in all, to be given to a tier: namespaces, and int32 bytes.

        Left out are those with fewer than `min_pages`, of closed sessions, and those that must not be stored. Each is
        returned once, and counts as stored from now on.
        """
        return []

    def note_stored(self, lease: Lease) -> None:
        """A tier has the pages of a lease."""

    def forget_stored(self) -> None:
        """The tier has nothing any more."""

    @property
    def counts_wants(self) -> bool:
        """Whether one more request can `want` its prefix."""
        return False

    def want(self, seq: int, match: PrefixMatch, num_missing: int) -> None:
        """Note the match of a waiting request: it is evicted after all that no request wants. It blocks no request.

        Args:
            seq: arrival number of the request; a new call replaces its match.
            match: must still be valid.
            num_missing: tokens of the request after the match.
        """

    def unwant(self, seq: int) -> None:
        """Note that a request waits no more."""

    def flush(self) -> IntArray:
        """Drop all pages that are not leased, including pinned ones, and return them."""
        return EMPTY

    def pin(self, extra_key: str, token_ids: bytes, until_s: float, tenant: str | None = None) -> int:
        """Pin the part of a prefix that is cached *now* until a time. Within the quota, its first pages are pinned.

        Pages that are cached later are not covered; another `pin` covers them. It also sets a new time, which may be
        earlier. The caller bounds the time. With a tenant it is a promise, see `Pins`, and `unpin` does not end it.

        Returns:
            number of pages of the prefix that this pin covers.
        """
        return 0

    def unpin(self, extra_key: str, token_ids: bytes) -> None:
        """End the pin that was made with the same arguments, if it still exists."""

    def expire_pins(self, now_s: float) -> None:
        """End the expired pins, and note the time for explanations. Called in each pass; cheap without pins."""

    def begin_turn(self, key: str, tenant: str, group: str, now_s: float) -> Session | None:
        """Count a request of a session; None: no sessions are kept.

        Args:
            key: of the session.
            tenant: of the request.
            group: of its parallel samples, which count once; "" for none.
            now_s: when it arrived.
        """
        return None

    @property
    def num_sessions(self) -> int:
        """Sessions that are kept."""
        return 0

    def residency(self) -> dict[str, HistogramCounts]:
        """How long a sample of the pages was cached, and how it was used; see `BlockResidency`."""
        return {}

    def newest_sessions(self, limit: int) -> list[tuple[Session, int]]:
        """The sessions with the latest turns, and how many pages the conversations of each cover."""
        return []

    def continues(self, session: Session, match: PrefixMatch) -> bool:
        """Whether a match that is still valid has all that is cached of one of a session's conversations."""
        return False

    def session(self, key: str) -> Session | None:
        """The session with this key; None: there is none."""
        return None

    def demote(self, session: Session, *, close: bool) -> int:
        """Let pages that only this session's conversations cover be evicted first, until they are used again.

        Promises of its tenant that end at these pages end, too. Pages of running requests are left out; with `close`
        they follow when their requests end, and the session is forgotten.

        Returns:
            number of pages.
        """
        return 0

    def promise(self, session: Session, until_s: float) -> tuple[int, int]:
        """Keep a session's conversations until a time, as `pin` for its tenant.

        Returns:
            pages that are promised, and pages of the conversations; pages that two of them share count twice.
        """
        return 0, 0

    def explain(self, extra_key: str, token_ids: bytes, match: PrefixMatch, rid: str) -> CacheMiss:
        """Explain why a match is not longer. The match must still be valid, so call this before `lock`.

        Args:
            extra_key: the namespace.
            token_ids: the whole prompt. Its last token was not part of the look-up.
            match: the match of this prompt.
            rid: the request.
        """
        return CacheMiss(rid, len(token_ids) // TOKEN_ID_BYTES, 0, MissKind.OFF, 0)

    def verify(self, leases: Iterable[Lease]) -> list[str]:
        """Errors found: wrong counters, locks without a lease, leases without a lock. Visits every node."""
        return []

    def all_pages(self) -> IntArray:
        """All pages that the cache owns; for checks."""
        return EMPTY
