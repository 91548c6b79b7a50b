"""`KVPool`: the keys and values of all tokens, tensors only. Which page belongs to whom is the scheduler's business."""

# Shapes: L layers, H KV heads on this rank, D head dim, slots = (pages + the dummy page) * page size.

from __future__ import annotations

import torch
from torch import Tensor


class KVPool:
    """KV memory, [slots, H, D] per layer for keys and for values.

    A page is contiguous, so it can be copied to another page, to the host or to another process in one piece. Page 0
    is the dummy page: padding writes there and nobody reads it.

    Attributes:
        k, v: L tensors each.
        page_views: the same memory as 2L tensors [pages, page_size, H, D], the keys of all layers first.
        page_size: slots of a page.
        page_bytes: of one page, all layers.
        num_bytes: memory reserved; on the CPU only what has been written is resident.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Reserve the memory.

        Args:
            num_pages: usable pages, the dummy page not counted: page ids are 0..num_pages.
        """
        shape = ((num_pages + 1) * page_size, num_kv_heads, head_dim)
        self.page_size = page_size
        self.k = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.v = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.page_views = [pool.view(-1, page_size, num_kv_heads, head_dim) for pool in (*self.k, *self.v)]
        self.num_bytes = sum(view.nbytes for view in self.page_views)
        self.page_bytes = self.num_bytes // (num_pages + 1)

    def copy_pages(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy whole pages in all layers.

        Args:
            sources, destinations: [C] int64 page ids, device. No page is both, and no destination comes twice.
        """
        for pages in self.page_views:
            pages.index_copy_(0, destinations, pages.index_select(0, sources))
