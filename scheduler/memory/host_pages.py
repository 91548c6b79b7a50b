"""`HostPages`: pages of host memory by id: the KV of swapped requests, and what the prefix cache has evicted.

Ids are 0..num_pages-1. Each is free, of a swapped request, or cached: `free + swapped + cached == total`. Cached pages
have keys (`prefix_cache/tier_pages.py`), and the least recently used one goes when another page is needed. A page that
returns to the device stays cached, so that it need not be copied again when the device evicts it again.

The runner copies to the host before anything else of a step, so a device page can be written in the step that copies
it out. It copies to the device after that and before the step reads KV, so a host page can be read in the step that
copies to it. It must not be written in a step that reads it: such pages are kept until that step is planned.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from ..arrays import EMPTY, IntArray
from .pages import PageAllocator

COPY_BUDGET_BYTES: Final = 256 << 20
"""Most bytes that one step copies in each direction, unless a single request needs more: about 12 ms at 20 GB/s."""
LEAST_COPY_PAGES: Final = 16


class HostPages:
    """See the module. With 0 pages no request is swapped, and nothing is cached.

    Attributes:
        num_swapped: pages of swapped requests.
        swapped_out_pages_total, swapped_in_pages_total: copies planned so far for swapped requests.
        cached_pages_total: copies planned of evicted pages.
        hit_pages_total: copies planned of cached pages to the device.
        lookups_total: requests that began, of which it may have had pages.
    """

    def __init__(self, num_pages: int, *, keeps_evicted: bool = False, page_bytes: int = 0) -> None:
        """Make an empty pool.

        Args:
            num_pages: of the host's KV pool.
            keeps_evicted: whether pages are cached.
            page_bytes: KV of a page; 0: unknown.
        """
        self.keeps_evicted: Final = keeps_evicted and num_pages > 0
        budget = COPY_BUDGET_BYTES // page_bytes if page_bytes else LEAST_COPY_PAGES
        self.max_copies: Final = max(LEAST_COPY_PAGES, budget)
        self._allocator = PageAllocator(num_pages)
        self._cached: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._outs: dict[int, int] = {}  # host page -> page
        self._ins: list[IntArray] = []
        self._num_ins_admitted = self._num_cached_read = 0
        self._reading: set[int] = set()  # host pages that the next step copies to the device
        self._left: list[IntArray] = []  # of these, those of requests that are not swapped any more
        self.num_swapped = 0
        self.swapped_out_pages_total = self.swapped_in_pages_total = 0
        self.cached_pages_total = self.hit_pages_total = self.lookups_total = 0

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self._allocator.num_pages

    @property
    def num_free(self) -> int:
        """Pages without contents."""
        return self._allocator.num_free

    @property
    def num_cached(self) -> int:
        """Pages that were evicted from the device."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that `swap_out` can take: free pages, and cached ones that the next step does not read."""
        return self._allocator.num_free + len(self._cached) - self._num_cached_read

    @property
    def has_outs(self) -> bool:
        """Whether copies to the host are planned for the next step."""
        return bool(self._outs)

    # ------------------------------------------------------------ swapped requests

    def swap_out(self, pages: IntArray) -> IntArray:
        """Plan to copy pages [n] to the host; return [n] host pages. The caller has checked `num_available`."""
        while self._allocator.num_free < len(pages):
            self._drop_oldest()
        host_pages = self._allocator.allocate(len(pages)) - np.int32(1)
        self._outs.update(zip(host_pages.tolist(), pages.tolist(), strict=True))
        self.num_swapped += len(pages)
        self.swapped_out_pages_total += len(pages)
        return host_pages

    def is_leaving(self, host_pages: IntArray) -> bool:
        """Whether the next step copies the pages of a swapped request to the host."""
        return int(host_pages[0]) in self._outs

    def swap_in(self, host_pages: IntArray, pages: IntArray) -> None:
        """Plan to copy host pages [n] of a swapped request to device pages [n]; `free` them afterwards."""
        self._read(host_pages, pages)
        self.swapped_in_pages_total += len(pages)

    def free(self, host_pages: IntArray) -> None:
        """Take back the pages of a request that is not swapped any more; those that the next step reads stay for it."""
        is_read = np.isin(host_pages, list(self._reading))
        self._left.append(host_pages[is_read])
        self._free(host_pages[~is_read].tolist())
        self.num_swapped -= int(np.count_nonzero(~is_read))

    # ------------------------------------------------------------ cached pages

    def cache(self, keys: Sequence[bytes], pages: IntArray) -> None:
        """Plan to copy pages [n] that are being evicted, the first ones if they are too many for a step.

        Pages with a key that is cached are not copied: equal keys have equal KV.
        """
        num_left = max(0, self.max_copies - len(self._outs))  # swapped requests may exceed the budget
        lacking = [idx for idx, key in enumerate(keys) if key not in self._cached]
        end = min(lacking[num_left] if len(lacking) > num_left else len(keys), self.num_available)
        for key in keys[:end]:
            if key in self._cached:
                self._cached.move_to_end(key)  # so that others make room
        for key, page in zip(reversed(keys[:end]), reversed(pages[:end].tolist()), strict=True):
            if key in self._cached:
                self._cached.move_to_end(key)  # without the first pages of a prefix, the others are of no use
                continue
            if not self._allocator.num_free:
                self._drop_oldest()
            host_page = int(self._allocator.allocate(1)[0]) - 1
            self._cached[key] = host_page
            self._outs[host_page] = page
            self.cached_pages_total += 1

    def count_cached(self, keys: Iterable[bytes]) -> int:
        """Number of the first keys that are cached, up to one that is not."""
        count = 0
        for key in keys:
            if key not in self._cached:
                break
            count += 1
        return count

    def may_copy_in(self, num_pages: int) -> bool:
        """Whether the next step may copy so many pages to the device, for one more request."""
        most = self.max_copies - self._num_ins_admitted
        return not (num_pages and self._num_ins_admitted) or num_pages <= most

    def admit(self, num_pages: int, keys: Sequence[bytes] = ()) -> None:
        """Count a request of the next step that starts with pages of the host; `keys`: cached ones, which stay."""
        self._num_ins_admitted += num_pages
        for key in reversed(keys):
            self._cached.move_to_end(key)
            if self._cached[key] not in self._reading:
                self._reading.add(self._cached[key])
                self._num_cached_read += 1

    def copy_in(self, keys: Sequence[bytes], pages: IntArray) -> None:
        """Plan to copy cached pages [n], which were admitted, to device pages [n]."""
        self._read(np.array([self._cached[key] for key in keys], dtype=np.int32), pages)
        self.hit_pages_total += len(pages)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop cached pages that may have bad KV. Call between passes."""
        for key in keys:
            if key in self._cached:
                self._free([self._cached.pop(key)])

    def flush(self) -> int:
        """Drop all cached pages; return their number. Call between passes."""
        count = len(self._cached)
        self.forget([*self._cached])
        return count

    # ------------------------------------------------------------ the next step

    def take_copies(self) -> tuple[IntArray, IntArray]:
        """([O, 2] to the host, [I, 2] to the device): the copies planned since the last call, for `StepPlan`."""
        outs = np.array([(page, host_page) for host_page, page in self._outs.items()], dtype=np.int32)
        ins = np.concatenate(self._ins) if self._ins else EMPTY
        self._outs, self._ins = {}, []
        self._reading.clear()
        self._num_ins_admitted = self._num_cached_read = 0
        for host_pages in self._left:
            self.num_swapped -= len(host_pages)
            self._free(host_pages.tolist())
        self._left = []
        return outs, ins

    def pages_cached(self) -> list[int]:
        """All cached pages; for checks."""
        return [*self._cached.values()]

    def _read(self, host_pages: IntArray, pages: IntArray) -> None:
        if len(pages):
            self._ins.append(np.stack([host_pages, pages], axis=1))
            self._reading.update(host_pages.tolist())

    def _drop_oldest(self) -> None:
        """Free the cached page that was not used for longest and that the next step does not read; there is one."""
        key, page = next(each for each in self._cached.items() if each[1] not in self._reading)
        del self._cached[key]
        self._free([page])

    def _free(self, host_pages: list[int]) -> None:
        for page in host_pages:
            self._outs.pop(page, None)  # nothing will read it
        self._allocator.free(np.array(host_pages, dtype=np.int32) + np.int32(1))
