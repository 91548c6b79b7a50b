"""`HostKVPool`: KV pages of swapped requests, and evicted ones, in host memory. Tensors only, like `KVPool`.

Copies are queued on the current stream after the work that the device still computes, without waiting. Later copies and
steps on that stream see their results. So a page may be overwritten right after its copy out is queued, and be copied
in right after that.
"""

# Shapes: L layers, H KV heads on this rank, D head dim, n pages of one copy.

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...runtime.errors import ConfigError

if TYPE_CHECKING:
    from .io_buffers import InputBuffers
    from .kv_pool import KVPool

Int64s = npt.NDArray[np.int64]

_STAGED_BYTES: Final = 32 << 20
"""Device memory that a copy may take for pages in host layout (temporarily twice this)."""


class HostKVPool:
    """Pages of KV on the host.

    A page holds all layers in one piece; on the device each layer has its own tensor. A swapped request moves all
    layers, and adjacent pages move in one copy. Within a layer the bytes are the same as on the device.

    Attributes:
        pages: [num_pages, 2L, page_size, H, D] host; per page the keys of all layers, then the values. Quantized pools
            have a second tensor with their scales, [num_pages, 2L, page_size, H]; and there is one for each size of
            rows, if layers differ. Pinned where the device is a GPU;
            elsewhere resident only where it has been written.
        num_bytes: memory reserved.
    """

    def __init__(self, kv_pool: KVPool, num_pages: int, buffers: InputBuffers) -> None:
        """Reserve the memory.

        Raises:
            ConfigError: the host cannot pin that much memory.
        """
        self._buffers = buffers
        alike: dict[tuple[torch.dtype, torch.Size], list[Tensor]] = {}
        for view in kv_pool.views:
            alike.setdefault((view.dtype, view.shape), []).append(view)
        self._views = list(alike.values())
        self.pages = [
            torch.empty((num_pages, len(views), *views[0].shape[1:]), dtype=views[0].dtype)
            for views in self._views
        ]
        self.num_bytes = sum(pages.nbytes for pages in self.pages)
        self._pages_per_copy = max(1, _STAGED_BYTES // kv_pool.page_bytes)
        if kv_pool.k[0].device.type == "cuda":
            for pages in self.pages:
                _pin(pages, self)

    def copy_out(self, pages: Int64s, host_pages: Int64s) -> None:
        """Queue copies device -> host: [n] page ids each, no host page twice."""
        for sources, targets in self._parts(pages, host_pages):
            where = self._buffers.put(sources)
            for views, pages_of_all in zip(self._views, self.pages, strict=True):
                staged = torch.stack([view.index_select(0, where) for view in views], dim=1)
                for first, last in _runs(targets):
                    host = pages_of_all[targets[first] : targets[last - 1] + 1]
                    host.copy_(staged[first:last], non_blocking=True)

    def copy_in(self, host_pages: Int64s, pages: Int64s) -> None:
        """Queue copies host -> device: [n] page ids each, no device page twice."""
        for targets, sources in self._parts(pages, host_pages):
            where = self._buffers.put(targets)
            for views, pages_of_all in zip(self._views, self.pages, strict=True):
                staged = pages_of_all.new_empty((len(sources), *pages_of_all.shape[1:]), device=where.device)
                for first, last in _runs(sources):
                    host = pages_of_all[sources[first] : sources[last - 1] + 1]
                    staged[first:last].copy_(host, non_blocking=True)
                for n, view in enumerate(views):
                    view.index_copy_(0, where, staged[:, n])

    def _parts(self, pages: Int64s, host_pages: Int64s) -> Iterator[tuple[Int64s, Int64s]]:
        """(pages, host pages), sorted by host page for long runs, in parts that fit the staging memory."""
        order = np.argsort(host_pages)
        for start in range(0, len(order), self._pages_per_copy):
            part = order[start : start + self._pages_per_copy]
            yield pages[part], host_pages[part]


def _runs(ascending: Int64s) -> list[tuple[int, int]]:
    """[first, last) indices of each run of consecutive numbers."""
    ends = [*(np.flatnonzero(np.diff(ascending) != 1) + 1).tolist(), len(ascending)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _pin(tensor: Tensor, owner: object) -> None:
    """Pin a tensor's memory for the GPU, for the lifetime of `owner`.

    Not `pin_memory=True`: torch's allocator of pinned memory rounds up to a power of two, so 5 GiB would take 8 GiB.
    """
    cudart: Any = torch.cuda.cudart()
    code = int(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    if code != 0:
        raise ConfigError(
            f"cannot pin {tensor.nbytes / (1 << 30):.1f} GiB of host memory for KV (CUDA error {code}); lower "
            f"--swap-space or --kv-host-size"
        )
    weakref.finalize(owner, cudart.cudaHostUnregister, tensor.data_ptr()).atexit = False
