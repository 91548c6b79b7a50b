"""Attention on the CPU by our own kernels: pages are read in place, and a shared prefix is read once for its requests.

A step is planned once for all layers with the same window and heads, also in C++ (`kernels/cpu/attention_plan.h`): the
plan assigns tokens to pieces of the keys that they attend to. Shared prefixes are found in the slot table, because the
prefix cache gives the same pages to requests with the same prefix.

The tokens of a request with drafts get the bits of that many decodes, one after the other, in the same batch.
"""

# Shapes: B requests, T new tokens in the batch, Hq query heads, H KV heads, D head dim.

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from ..kernels.cpu.library import load_library, reasons_against_library
from .backend import AttentionBackend, result_of

if TYPE_CHECKING:
    from ...models.spec.model_spec import LayerView, ModelSpec
    from ..memory.io_buffers import InputBuffers
    from ..memory.kv_pool import KVPool
    from .backend import BatchLayout, Int64s, RepeatableAttention, StepAttention

_HEAD_DIM_MULTIPLE: Final = 16  # one vector of the kernels
_DTYPES: Final = (torch.bfloat16, torch.float32)
_ALL_DECODE: Final = None
_ONLY_ITSELF: Final = None


class CpuNativeAttention(AttentionBackend):
    """Attention backend for CPUs; see the module."""

    name: ClassVar[str] = "native"

    @staticmethod
    def reasons_against(
        spec: ModelSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> list[str]:
        if device.type != "cpu":
            return [f"runs on CPUs only, not on {device.type}"]
        reasons = []
        if dtype not in _DTYPES:
            reasons.append(f"computes in bfloat16 and float32 only, not in {dtype}")
        if kv_dtype not in (dtype, torch.int8):
            reasons.append(
                f"reads keys and values of the queries' dtype or int8, not {kv_dtype} with queries of {dtype}"
            )
        reasons += [
            f"head_dim {head_dim} is not a multiple of {_HEAD_DIM_MULTIPLE}"
            for head_dim in spec.head_dims
            if head_dim % _HEAD_DIM_MULTIPLE
        ]
        return reasons or reasons_against_library()

    def __init__(
        self,
        spec: ModelSpec,
        kv_pool: KVPool,
        req_to_token: Tensor,
        buffers: InputBuffers,
        library: ctypes.CDLL | None = None,
        *,
        fixed_order: bool = False,
    ) -> None:
        """See `AttentionBackend`.

        Args:
            library: kernels to use instead of those for this CPU.
            fixed_order: a token's bits depend only on the tokens before it; decodes take longer.
        """
        self._library = load_library() if library is None else library
        self._kv_pool = kv_pool
        assert req_to_token.dtype == torch.int32 and req_to_token.is_contiguous()
        self._table = req_to_token
        self._spec = spec
        self._views = [spec.view_of(layer_id) for layer_id in range(spec.num_layers)]
        self._fixed_order = fixed_order
        dtype = kv_pool.k[0].dtype
        assert dtype in (*_DTYPES, torch.int8), dtype
        for layer_id in spec.attention_layers:
            heads = self._views[layer_id].heads
            for pool in kv_pool.layer(layer_id)[:2]:
                assert pool.dtype == dtype and pool.is_contiguous()
                assert pool.shape[1:] == (heads.num_kv_heads, heads.head_dim), pool.shape
        self._kv_dtype = dtype
        self._addresses = {  # the pool never moves
            layer_id: tuple(None if part is None else part.data_ptr() for part in kv_pool.layer(layer_id))
            for layer_id in spec.attention_layers
        }
        self._spare: list[_Plans] = []
        self._repeatable: _Plans | None = None

    def plan_step(self, layout: BatchLayout) -> StepAttention:
        """A plan's memory is reused when its step has been deleted."""
        plans = self._spare.pop() if self._spare else self._make_plans()
        columns = layout.rows, layout.prefix_lens, layout.extend_lens, layout.decodes()
        numbers = tuple(map(_int64s, columns))
        addresses = [column.ctypes.data for column in numbers]
        sees_to = None if layout.sees_to is None else _int64s(layout.sees_to)
        ends = _ONLY_ITSELF if sees_to is None else sees_to.ctypes.data
        for plan, view in zip(plans.addresses, plans.views, strict=True):
            seen = _ONLY_ITSELF if view.causal_images else ends
            self._library.plan_attention(plan, *addresses, seen, len(layout.rows))
        step = self._step(plans, int(layout.extend_lens.sum()))
        weakref.finalize(step, self._spare.append, plans).atexit = False
        return step

    def repeatable(self) -> RepeatableAttention:
        return self

    def repeatable_step(self, rows: Tensor, prefix_lens: Tensor, extend_lens: Tensor) -> StepAttention:
        """See `RepeatableAttention`.

        All repeatable steps share one plan, and each step fills it again: a plan keeps the memory of its largest step,
        and there can be as many steps as batch sizes.
        """
        columns = rows, prefix_lens, extend_lens
        for column in columns:
            assert column.dtype == torch.int64 and column.is_contiguous() and len(column) == len(rows)
        self._repeatable = plans = self._repeatable or self._make_plans()
        addresses = [column.data_ptr() for column in columns]
        for plan in plans.addresses:
            self._library.plan_attention(plan, *addresses, _ALL_DECODE, _ONLY_ITSELF, len(rows))
        return self._step(plans, len(rows))

    def _make_plans(self) -> _Plans:
        return _Plans(
            self._library,
            self._table,
            self._spec,
            self._kv_pool.page_size,
            self._views,
            fixed_order=self._fixed_order,
        )

    def _step(self, plans: _Plans, num_tokens: int) -> _Step:
        """The library calls are the same for any number of tokens (`ForwardProgram`)."""
        return _Step(
            self._library.attend,
            self._addresses,
            plans,
            self._kv_dtype,
            num_tokens,
            [(view.heads.num_heads, view.heads.head_dim) for view in self._views],
        )


class _Plans:
    """One plan for each distinct view of a model's layers.

    Attributes:
        addresses: addresses of the plans.
        views: of the plans.
        of_layer: address of each layer's plan.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        table: Tensor,
        spec: ModelSpec,
        page_size: int,
        views: list[LayerView],
        *,
        fixed_order: bool,
    ) -> None:
        by_view = {
            view: library.new_attention_plan(
                table.data_ptr(),
                table.shape[1],
                page_size,
                view.heads.num_kv_heads,
                view.heads.num_heads // view.heads.num_kv_heads,
                view.heads.head_dim,
                view.window or 0,
                view.chunked,
                spec.causal,
                fixed_order,
                spec.score_scale,
                spec.attention.score_cap or 0.0,
            )
            for view in dict.fromkeys(views)
        }
        self.addresses, self.views = list(by_view.values()), list(by_view)
        self.of_layer = [by_view[view] for view in views]
        for address in self.addresses:
            weakref.finalize(self, library.free_attention_plan, address).atexit = False


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _Step:
    attend: ctypes._NamedFuncPointer
    addresses: Mapping[int, tuple[int | None, ...]]  # of each layer's keys, values, and their scales
    plans: _Plans
    kv_dtype: torch.dtype
    num_tokens: int
    heads: list[tuple[int, int]]  # of each layer: number of query heads, and their size

    @property
    def plan_addresses(self) -> list[int]:
        return self.plans.addresses

    def forward(
        self, layer_id: int, q: Tensor, sinks: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """The sinks are read again when a recorded step is repeated."""
        is_right = q.dtype == self.kv_dtype or (self.kv_dtype == torch.int8 and q.dtype in _DTYPES)
        num_heads, head_dim = self.heads[layer_id]
        assert is_right and q.shape == (self.num_tokens, num_heads, head_dim), (
            f"queries are {q.dtype} {tuple(q.shape)}"
        )
        assert sinks is None or (sinks.dtype == torch.float32 and sinks.shape == (num_heads,))
        if q.stride(2) != 1 or q.stride(1) != head_dim:
            q = q.contiguous()
        if out is None:
            out = result_of(q)
        self.attend(
            self.plans.of_layer[layer_id],
            q.data_ptr(),
            q.stride(0),
            *self.addresses[layer_id],
            None if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
            q.dtype == torch.bfloat16,
        )
        return out


def _int64s(numbers: Int64s) -> Int64s:
    return np.ascontiguousarray(numbers, dtype=np.int64)
