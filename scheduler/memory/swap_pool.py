"""`SwapPool`: which pages of the host's KV pool are taken, and what the next step must copy there and back."""

from __future__ import annotations

import numpy as np

from ..arrays import EMPTY, IntArray
from .page_allocator import PageAllocator


class SwapPool:
    """Pages for the KV of swapped requests. Ids are 0..num_pages-1; without pages nothing can be swapped.

    The runner copies out before anything else of a step, so pages on the device may be given to others in the same
    pass; and it copies in before the step reads, so pages on the host are free as soon as their copy is planned.

    Attributes:
        swapped_out_pages_total, swapped_in_pages_total: copies planned so far.
    """

    __slots__ = (
        "_allocator",
        "_ins",
        "_outs",
        "_swap_in_reserved",
        "swapped_in_pages_total",
        "swapped_out_pages_total",
    )

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
        """Whether copies to the host are planned for the next step, so that none may come back in it."""
        return bool(self._outs)

    @property
    def swap_in_reserved(self) -> bool:
        """Whether a swapped request comes back in the next step, so that nothing may go to the host in it."""
        return self._swap_in_reserved

    def swap_out(self, pages: IntArray) -> IntArray:
        """Plan to copy pages to the host; [n] the host's pages. Callers look at `num_free` before."""
        assert not self._swap_in_reserved, "in and out in the same step"
        host_pages = self._allocator.allocate(len(pages)) - 1
        self._outs.append(np.stack([pages, host_pages], axis=1))
        self.swapped_out_pages_total += len(pages)
        return host_pages.astype(np.int32)

    def reserve_swap_in(self) -> None:
        """A swapped request was admitted; `swap_in` follows when its pages are taken, at the end of the pass."""
        self._swap_in_reserved = True

    def swap_in(self, host_pages: IntArray, pages: IntArray) -> None:
        """Plan to copy pages back to the device."""
        if len(pages):
            assert not self._outs, "in and out in the same step"
            self._ins.append(np.stack([host_pages, pages], axis=1))
            self.swapped_in_pages_total += len(pages)

    def free(self, host_pages: IntArray) -> None:
        """Nobody needs these any more."""
        self._allocator.free(host_pages + 1)

    def take_copies(self) -> tuple[IntArray, IntArray]:
        """([O, 2] out, [I, 2] in) since the last call, for `StepPlan`."""
        outs, ins = self._outs, self._ins
        self._outs, self._ins = [], []
        self._swap_in_reserved = False
        return _joined(outs), _joined(ins)


def _joined(parts: list[IntArray]) -> IntArray:
    return np.concatenate(parts) if parts else EMPTY
