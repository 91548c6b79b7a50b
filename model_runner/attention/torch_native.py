"""Attention in plain torch, on any device: gather a request's keys and values by the slot table, then attend.

Layers with a sliding window gather only the window; layers that differ in windows or heads are planned separately.
Extends run one by one. Decodes run together, padded to the longest request of their group; requests are grouped by
length to keep the padding small. The cost of this backend is the gathering: it copies keys and values in every layer.

It computes in the dtype of the KV pool for queries of any dtype, and in bfloat16 for 8-bit pools. Values with scales
are multiplied by their scale while they are gathered.
"""

# Shapes: T new tokens in the batch, Hq query heads, H KV heads, G = Hq // H, D head dim, n requests of a decode group,
# P longest length in it.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from ...launch.resolve.memory_budget import GATHERED_COPIES
from .backend import AttentionBackend, result_of
from .dense import EncoderAttention, ExtendAttention, ScoreForm, decode_attention

if TYPE_CHECKING:
    from ...models.spec.model_spec import LayerView, ModelSpec
    from ..memory.io_buffers import InputBuffers
    from ..memory.kv_pool import KVPool
    from ..ops.rotation import LayerKV
    from .backend import BatchLayout, Int64s, StepAttention

_MAX_PADDING: Final = 1024
"""Padded slots that cost as much as one more group: both about 50 us, two Zen 5 cores, D = 64, H = 3."""


@dataclass(frozen=True, slots=True)
class _Extend:
    """One request with several new tokens, which begin at token `start` of the batch.

    Attributes:
        slots: [old + extend_len] int32, of all tokens to which a new one attends.
        sees_to: [extend_len] for each new token the end of those of `slots`; None: its own is the last.
    """

    start: int
    extend_len: int
    slots: Tensor
    sees_to: Int64s | None


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Requests with one new token and similar lengths.

    Attributes:
        tokens: their positions in the batch: a slice, or [n] int64.
        slots: [n * P] int32; padding repeats the request's last slot, so it reads only the request's own values.
        mask: [n, 1, G, P], 0 or -inf; None without padding.
    """

    tokens: slice | Tensor
    slots: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _View:
    """The plan of a step for the layers of one view."""

    extends: list[_Extend]
    groups: list[_DecodeGroup]
    extend_attention: ExtendAttention | EncoderAttention


class TorchNativeAttention(AttentionBackend):
    """Attention backend in plain torch; see the module."""

    name: ClassVar[str] = "torch_native"

    @staticmethod
    def reasons_against(
        spec: ModelSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> list[str]:
        """Empty: this backend runs everywhere."""
        return []

    def __init__(self, spec: ModelSpec, kv_pool: KVPool, req_to_token: Tensor, buffers: InputBuffers) -> None:
        self._kv_pool = kv_pool
        self._req_to_token = req_to_token
        self._buffers = buffers
        self._form = form = ScoreForm(spec.score_scale, spec.attention.score_cap)
        self._views = [spec.view_of(layer_id) for layer_id in range(spec.num_layers)]
        dtype, device = kv_pool.k[0].dtype, kv_pool.k[0].device
        self._dtype = torch.bfloat16 if dtype.itemsize == 1 else dtype
        self._extend_attention = {
            window: ExtendAttention(self._dtype, device, form, window, chunked=spec.attention.chunked)
            if spec.causal
            else EncoderAttention(form.scale, window)
            for window in dict.fromkeys(view.window for view in self._views)
        }

    @property
    def gathered_token_bytes(self) -> int:
        """Keys and values of one layer, and their copies."""
        widest = max(pool.shape[1] * pool.shape[2] for pool in self._kv_pool.k)
        return 2 * widest * self._dtype.itemsize * GATHERED_COPIES

    def plan_step(self, layout: BatchLayout) -> StepAttention:
        starts = np.cumsum(layout.extend_lens) - layout.extend_lens
        views = {view: self._view(layout, starts, view) for view in dict.fromkeys(self._views)}
        return _Step(
            self._kv_pool,
            [views[view] for view in self._views],
            self._dtype,
            self._form,
        )

    def _view(self, layout: BatchLayout, starts: Int64s, of: LayerView) -> _View:
        window, group_size = of.window, of.heads.num_heads // of.heads.num_kv_heads
        seq_lens = layout.prefix_lens + layout.extend_lens
        firsts = np.zeros_like(seq_lens)  # the first token to which a new token of each request attends
        if window is not None:
            firsts = np.maximum(layout.prefix_lens - window + 1, 0)
            if of.chunked:
                firsts = layout.prefix_lens // window * window
        extends = [
            _Extend(
                start=int(starts[idx]),
                extend_len=int(layout.extend_lens[idx]),
                slots=self._req_to_token[int(layout.rows[idx]), int(firsts[idx]) : int(seq_lens[idx])],
                sees_to=None
                if layout.sees_to is None or of.causal_images
                else layout.sees_to[starts[idx] : starts[idx] + layout.extend_lens[idx]] - firsts[idx],
            )
            for idx in range(layout.num_extends)
        ]
        decodes = layout.num_extends
        groups = [
            self._decode_group(layout.rows, starts, firsts, seq_lens, decodes + members, group_size)
            for members in group_by_length((seq_lens - firsts)[decodes:])
        ]
        return _View(extends, groups, self._extend_attention[window])

    def _decode_group(
        self,
        rows: Int64s,
        starts: Int64s,
        firsts: Int64s,
        seq_lens: Int64s,
        members: Int64s,
        group_size: int,
    ) -> _DecodeGroup:
        lens = (seq_lens - firsts)[members]
        padded_len = int(lens.max())
        put = self._buffers.put
        columns = firsts[members][:, None] + np.minimum(np.arange(padded_len), lens[:, None] - 1)
        flat = rows[members][:, None] * self._req_to_token.shape[1] + columns
        slots = self._req_to_token.view(-1).index_select(0, put(flat.reshape(-1)))
        mask = None
        if int(lens.min()) < padded_len:
            beyond = np.arange(padded_len) >= lens[:, None]
            penalty = put(np.where(beyond, -np.inf, 0.0).astype(np.float32)).to(self._dtype)
            # Contiguous: with a broadcast mask SDPA on the CPU does not use its fast path.
            mask = penalty[:, None, None, :].expand(-1, 1, group_size, -1).contiguous()
        first, last = int(members[0]), int(members[-1])
        if last - first + 1 == len(members):
            return _DecodeGroup(slice(int(starts[first]), int(starts[last]) + 1), slots, mask)
        return _DecodeGroup(put(starts[members]), slots, mask)


def group_by_length(seq_lens: Int64s) -> list[Int64s]:
    """Split requests into groups of similar length, at most `_MAX_PADDING` padded slots in each.

    Returns:
        indices into `seq_lens` in ascending order, one array per group.
    """
    if len(seq_lens) == 0:
        return []
    padding = int(seq_lens.max()) * len(seq_lens) - int(seq_lens.sum())
    if padding <= _MAX_PADDING:
        return [np.arange(len(seq_lens))]
    order = np.argsort(-seq_lens, kind="stable")
    groups, first, padding = [], 0, 0
    for idx, member in enumerate(order):
        padding += int(seq_lens[order[first]] - seq_lens[member])
        if padding > _MAX_PADDING:
            groups.append(np.sort(order[first:idx]))
            first, padding = idx, 0
    groups.append(np.sort(order[first:]))
    return groups


@dataclass(frozen=True, slots=True)
class _Step:
    kv_pool: KVPool
    views: list[_View]  # one per layer
    dtype: torch.dtype  # of the computation
    form: ScoreForm

    def forward(
        self, layer_id: int, q: Tensor, sinks: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        if q.dtype != self.dtype:
            rounded = self.forward(layer_id, q.to(self.dtype), sinks)
            return rounded.to(q.dtype) if out is None else out.copy_(rounded)
        kv = self.kv_pool.layer(layer_id)
        view = self.views[layer_id]
        if sinks is not None:
            sinks = sinks.view(kv.k.shape[1], -1)
        if not view.extends and len(view.groups) == 1 and isinstance(view.groups[0].tokens, slice):
            attended = self._decode(q, kv, view.groups[0], sinks)
            return attended if out is None else out.copy_(attended)
        if out is None:
            out = result_of(q)
        for extend in view.extends:
            self._extend(q, kv, extend, view.extend_attention, out, sinks)
        for group in view.groups:
            out[group.tokens] = self._decode(q[group.tokens], kv, group, sinks)
        return out

    def _decode(self, q: Tensor, kv: LayerKV, group: _DecodeGroup, sinks: Tensor | None) -> Tensor:
        """[n, Hq, D] -> [n, Hq * D]; sinks: [H, G]."""
        n, _, head_dim = q.shape
        num_kv_heads = kv.k.shape[1]
        by_request = (n, -1, num_kv_heads, head_dim)
        k = self._gather(kv.k, kv.k_scale, group.slots).view(by_request)
        v = self._gather(kv.v, kv.v_scale, group.slots).view(by_request)
        q = q.reshape(n, num_kv_heads, -1, head_dim)
        return decode_attention(q, k, v, group.mask, self.form, sinks).reshape(n, -1)

    def _extend(
        self,
        q: Tensor,
        kv: LayerKV,
        extend: _Extend,
        attend: ExtendAttention | EncoderAttention,
        out: Tensor,
        sinks: Tensor | None,
    ) -> None:
        """Fill the request's rows of `out`, [T, Hq * D]."""
        tokens = slice(extend.start, extend.start + extend.extend_len)
        num_kv_heads = kv.k.shape[1]
        by_group = (extend.extend_len, num_kv_heads, -1, q.shape[2])
        k = self._gather(kv.k, kv.k_scale, extend.slots).view(-1, num_kv_heads, q.shape[2])
        v = self._gather(kv.v, kv.v_scale, extend.slots).view(-1, num_kv_heads, q.shape[2])
        attend(q[tokens].view(by_group), k, v, out[tokens].view(by_group), sinks, extend.sees_to)

    def _gather(self, pool: Tensor, scales: Tensor | None, slots: Tensor) -> Tensor:
        """Rows of the flattened pool, [slots, H * D]: 5 to 15 times as fast as indexing in three dimensions."""
        if scales is not None:
            numbers = pool.flatten(1).index_select(0, slots).view(len(slots), *pool.shape[1:])
            return (numbers * scales.index_select(0, slots).unsqueeze(-1)).flatten(1).to(self.dtype)
        if pool.dtype.itemsize == 1:  # some torch versions cannot select rows of float8
            return pool.flatten(1).view(torch.uint8).index_select(0, slots).view(pool.dtype).to(self.dtype)
        return pool.flatten(1).index_select(0, slots)
