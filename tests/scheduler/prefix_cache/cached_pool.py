"""`CachedPool`: a page pool with a prefix cache in front, as small as can be; serves one prompt after another."""

from __future__ import annotations

import numpy as np

from engine.runtime.config.engine_config import EvictionPolicyName
from engine.scheduler.arrays import IntArray
from engine.scheduler.prefix_cache.base import Lease
from engine.scheduler.prefix_cache.eviction import EVICTION_RANKS
from engine.scheduler.prefix_cache.radix_cache import RadixCache


def ids(*tokens: int) -> bytes:
    """Token ids as the cache takes them."""
    return np.array(tokens, dtype=np.int32).tobytes()


def pages(*values: int) -> IntArray:
    """Page numbers."""
    return np.array(values, dtype=np.int32)


class CachedPool:
    """Pages 1..num_pages, each owned by the free list, the cache or a request.

    Attributes:
        free: pages nobody owns, the next one last.
    """

    def __init__(
        self,
        num_pages: int,
        policy: EvictionPolicyName = "lru",
        page_size: int = 1,
        max_pinned_pages: int = 0,
    ) -> None:
        self.cache = RadixCache(page_size, eviction=EVICTION_RANKS[policy], max_pinned_pages=max_pinned_pages)
        self.page_size = page_size
        self.free = list(range(num_pages, 0, -1))

    def begin(self, prompt: list[int], extra_key: str = "", priority: int = 0) -> tuple[int, Lease]:
        """Find, lease, make room and extend; returns the pages found and the lease on the whole prompt."""
        cache, token_ids = self.cache, ids(*prompt)
        num_pages = len(prompt) // self.page_size
        match = cache.match(extra_key, token_ids, num_pages)
        lease = cache.lock(extra_key, match, priority)
        num_new = num_pages - match.num_pages
        self.free.extend(cache.evict(num_new - len(self.free)).tolist())
        own = pages(*(self.free.pop() for _ in range(num_new)))
        start = match.num_pages * self.page_size
        kept = cache.extend(lease, ids(*prompt[start : num_pages * self.page_size]), own)
        assert kept.tolist() == own.tolist()
        return match.num_pages, lease

    def serve(self, prompt: list[int], extra_key: str = "", priority: int = 0, *, once: bool = False) -> int:
        """A whole request; returns the pages it found in the cache."""
        num_found, lease = self.begin(prompt, extra_key, priority)
        self.cache.release(lease, once=once)
        return num_found

    def cached(self, prompt: list[int], extra_key: str = "") -> int:
        """How many pages of a prompt are cached; no use of them."""
        return self.cache.match(extra_key, ids(*prompt), len(prompt)).num_pages
