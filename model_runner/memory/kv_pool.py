"""`KVPool`: the tensors with the keys and values of all tokens. The scheduler assigns the pages to requests."""

# Shapes: L layers, H KV heads on this rank, D head dim, slots = (pages + the dummy page) * page size.

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..ops.rotation import LayerKV
from .host_memory import PreFaulter, reserve

if TYPE_CHECKING:
    from ...models.spec.layer_form import LayerHeads


class KVPool:
    """KV memory, [slots, H, D] per layer for keys and for values.

    A page is contiguous, so it can be copied to another page, to the host or to another process in one piece. Page 0
    is the dummy page: padding tokens write there and it is never read.

    All layers of an encoder share one layer's memory: its keys and values are not read after their layer.

    With latent attention the values are a part of the keys, so both are one tensor.

    Layers may have rows of different sizes; a page is then a page of each of them.

    In an int8 pool each token and head has a scale: a value is the stored integer times the scale.

    Attributes:
        k, v: L tensors each, or one of each that all layers share; the same ones if keys hold the values.
        k_scale, v_scale: L tensors [slots, H] float32 each; empty unless the pool is int8.
        page_views: the same memory as 2L (or 2) tensors [pages, page_size, H, D], the keys of all layers first; L of
            them if keys hold the values. H and D are those of the layer. Views of 8-bit pools have the dtype uint8,
            because torch cannot index some 8-bit dtypes on every device.
        scale_views: the same for the scales, [pages, page_size, H]; empty without scales.
        page_states: [pages, S] a drafter's feature of the last computed token of each page; None without one.
        page_ends: [pages, 1] int64, the position of this token; None as above.
        views: all of these.
        page_size: slots per page.
        page_bytes: bytes of one page, all layers.
        num_bytes: memory reserved; on the CPU only what has been written or prepared (`fault_in_some`) is resident.
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
        layer_ids: Sequence[int] = (),
        keys_hold_values: bool = False,
        layer_heads: Sequence[LayerHeads] = (),
        sources: Sequence[int] = (),
        page_states: tuple[int, torch.dtype] | None = None,
    ) -> None:
        """Reserve the memory.

        Args:
            num_layers: layers with memory of their own (`ModelSpec.num_kv_layers`).
            layer_ids: ids of these layers, if the model has other layers, too; empty: 0..num_layers-1.
            num_pages: usable pages, the dummy page not counted: page ids are 0..num_pages.
            keys_hold_values: values take no memory of their own.
            layer_heads: heads of the layers with memory, in place of `num_kv_heads` and `head_dim`.
            sources: for each layer of the model the index of its memory; empty: all have their own, or share one.
            page_states: their size and dtype.
        """
        num_slots = (num_pages + 1) * page_size
        shapes = [(num_slots, each.num_kv_heads, each.head_dim) for each in layer_heads]
        shapes = shapes or [(num_slots, num_kv_heads, head_dim)] * num_layers
        assert len(shapes) == num_layers
        self.page_size = page_size
        # FA3 may load whole pages and multiply the slots after a request's end by 0, so they must not hold NaN. On the
        # CPU such slots are not read, and memory that is never written is not resident.
        make = reserve if device.type == "cpu" else partial(_zeros, device)
        parts = 1 if keys_hold_values else 2
        pools = [[make(shape, dtype) for shape in shapes] for _ in range(parts)]
        scaled = shapes if dtype == torch.int8 else []
        scales = [[make(shape[:2], torch.float32) for shape in scaled] for _ in range(parts)]
        self.k, self.v = pools[0], pools[-1]
        self.k_scale, self.v_scale = scales[0], scales[-1]
        shown = torch.uint8 if dtype.itemsize == 1 else dtype
        self.page_views = [
            pool.view(shown).view(-1, page_size, *pool.shape[1:]) for part in pools for pool in part
        ]
        self.scale_views = [each.view(-1, page_size, each.shape[1]) for part in scales for each in part]
        self.views = [*self.page_views, *self.scale_views]
        self.page_states = self.page_ends = None
        if page_states is not None:
            self.page_states = make((num_pages + 1, page_states[0]), page_states[1])
            self.page_ends = make((num_pages + 1, 1), torch.int64)
            self.views += [self.page_states, self.page_ends]
        self.num_bytes = sum(view.nbytes for view in self.views)
        self.page_bytes = self.num_bytes // (num_pages + 1)
        self._num_pages = num_pages
        self._index_of = {layer_id: index for index, layer_id in enumerate(layer_ids)}
        if sources:
            self._index_of = dict(enumerate(sources))
        self._prefaulter = PreFaulter(self.views if device.type == "cpu" else [])

    def fault_in_some(self, used_pages: int, ahead_bytes: int) -> bool:
        """On the CPU: make more of the memory after the pages 0..used_pages resident; returns whether there is more.

        Takes a millisecond, or a few in a virtual machine; called while no request waits.

        Args:
            ahead_bytes: bytes after the used pages, of all layers together, that are to be resident.
        """
        ahead_pages = ahead_bytes // self.page_bytes
        return self._prefaulter.fault_in_some((used_pages + 1 + ahead_pages) / (self._num_pages + 1))

    def index_of(self, layer_id: int) -> int:
        """Index of a layer's tensors."""
        return self._index_of[layer_id] if self._index_of else layer_id % len(self.k)

    def layer(self, layer_id: int) -> LayerKV:
        """The tensors of one layer."""
        index = self.index_of(layer_id)
        k, v = self.k[index], self.v[index]
        if not self.k_scale:
            return LayerKV(k, v)
        return LayerKV(k, v, self.k_scale[index], self.v_scale[index])

    def beyond(self, first: int, layer_ids: Sequence[int]) -> KVPool:
        """The tensors from index `first` on as the pool of another model with the same pages.

        Args:
            first: number of tensors of this model.
            layer_ids: the other model's layers of these tensors.
        """
        pool = copy.copy(self)
        pool.k, pool.v = self.k[first:], self.v[first:]
        pool.k_scale, pool.v_scale = self.k_scale[first:], self.v_scale[first:]
        pool._index_of = {layer_id: index for index, layer_id in enumerate(layer_ids)}
        return pool

    def copy_pages(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy whole pages in all layers.

        Args:
            sources, destinations: [C] int64 page ids, device. No page is in both, and no destination occurs twice.
        """
        for pages in self.views:
            pages.index_copy_(0, destinations, pages.index_select(0, sources))


def _zeros(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)
