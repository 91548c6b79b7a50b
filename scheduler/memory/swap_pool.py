"""`SwapPool`: the pages of the host's KV pool, and the copies to and from the host that the next step must make."""

from __future__ import annotations

import numpy as np

from ..arrays import EMPTY, IntArray
from .page_allocator import PageAllocator


class SwapPool:
    """Host pages for the KV of swapped requests. Ids are 0..num_pages-1; with 0 pages no request is swapped.

    The runner copies to the host before anything else of a step, so the device pages can be reused in the same pass.
    It copies to the device before the step reads KV, so host pages are free as soon as their copy is planned.

    Attributes:
        swapped_out_pages_total, swapped_in_pages_total: copies planned so far.
    """

    def __init__(self, num_pages: int) -> None:
        self._allocator = PageAllocator(num_pages)
        self._outs: list[IntArray] = []
        self._ins: list[IntArray] = []
        self._swap_in_reserved = False
        self.swapped_out_pages_total = 0
        self.swapped_in_pages_total = 0

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self._allocator.num_pages

    @property
    def num_free(self) -> int:
        """Pages that `swap_out` can take."""
        return self._allocator.num_free

    @property
    def has_outs(self) -> bool:
        """Whether copies to the host are planned for the next step. Then that step copies none to the device."""
        return bool(self._outs)

    @property
    def swap_in_reserved(self) -> bool:
        """Whether a swapped request returns in the next step. Then that step copies none to the host."""
        return self._swap_in_reserved

    def swap_out(self, pages: IntArray) -> IntArray:
        """Plan to copy pages [n] to the host; return [n] host pages. The caller has checked `num_free`."""
        assert not self._swap_in_reserved, "in and out in the same step"
        host_pages = self._allocator.allocate(len(pages)) - 1
        self._outs.append(np.stack([pages, host_pages], axis=1))
        self.swapped_out_pages_total += len(pages)
        return host_pages.astype(np.int32)

    def reserve_swap_in(self) -> None:
        """Note that a swapped request was admitted. `swap_in` follows at the end of the pass, with its pages."""
        self._swap_in_reserved = True

    def swap_in(self, host_pages: IntArray, pages: IntArray) -> None:
        """Plan to copy host pages [n] to device pages [n]."""
        if len(pages):
            assert not self._outs, "in and out in the same step"
            self._ins.append(np.stack([host_pages, pages], axis=1))
            self.swapped_in_pages_total += len(pages)

    def free(self, host_pages: IntArray) -> None:
        """Free host pages."""
        self._allocator.free(host_pages + 1)

    def take_copies(self) -> tuple[IntArray, IntArray]:
        """([O, 2] to the host, [I, 2] to the device): the copies planned since the last call, for `StepPlan`."""
        outs, ins = self._outs, self._ins
        self._outs, self._ins = [], []
        self._swap_in_reserved = False
        return _joined(outs), _joined(ins)


def _joined(parts: list[IntArray]) -> IntArray:
    return np.concatenate(parts) if parts else EMPTY
