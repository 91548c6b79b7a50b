"""`IncomingPages`: pages that another engine writes, from their allocation until the prefix cache has them.

They are a term of the page equation (`ledger.py`). No request owns them: a request with a prompt that is computed
elsewhere has no row before the prompt has come.
"""

from __future__ import annotations

import numpy as np

from ..arrays import AnyIntArray, BoolArray, IntArray
from ..prefix_cache.base import Lease, PrefixCache
from .page_supply import PageSupply


class IncomingPages:
    """See the module.

    Attributes:
        num_pages: pages that are taken and neither adopted nor given back.
    """

    def __init__(self, supply: PageSupply, prefix_cache: PrefixCache) -> None:
        self._supply = supply
        self._cache = prefix_cache
        self._is_incoming: BoolArray = np.zeros(supply.num_pages + 1, dtype=np.bool_)
        self.num_pages = 0

    def take(self, count: int) -> IntArray:
        """Allocate pages, [count] int32; evict if needed. The caller checks `KVMemory.available_pages`."""
        pages = self._supply.take(count)
        self._is_incoming[pages] = True
        self.num_pages += count
        return pages

    def adopt(self, lease: Lease, token_ids: bytes, pages: IntArray) -> None:
        """Give written pages to the prefix cache; where it has the same tokens already, they become free.

        Args:
            lease: of the prefix before them; grows.
            token_ids: int32 bytes of the tokens in the pages.
            pages: [n] the pages, written and taken before.
        """
        self._drop(pages)
        cached = self._cache.extend(lease, token_ids, pages)
        self._supply.give_back(pages[cached != pages] if cached.size else pages)

    def give_back(self, pages: AnyIntArray) -> None:
        """Free pages that nothing will be written to any more."""
        self._drop(pages)
        self._supply.give_back(pages)

    def all_pages(self) -> AnyIntArray:
        """All pages that are counted here; for checks."""
        return np.flatnonzero(self._is_incoming)

    def _drop(self, pages: AnyIntArray) -> None:
        assert self._is_incoming[pages].all(), pages
        self._is_incoming[pages] = False
        self.num_pages -= len(pages)
