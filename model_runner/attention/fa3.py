"""FlashAttention-3 from sgl_kernel: extends and decodes of a batch in one call per layer, which reads the pool's pages.

With an fp8 pool queries are converted to fp8, too (unit scales, as the pool's).

The page table of the batch and FA3's own work plan (*scheduler metadata*, one for each view of the layers) are made
once per step, not once per layer.

Shah et al. 2024; the interface is `sgl_kernel/flash_attn.py` of sglang-kernel 0.4.
"""

# Shapes: B requests, T new tokens in the batch, Hq query heads, H KV heads on this rank, D head dim.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from ...runtime.step_plan import MAX_DRAFT_STEP_TOKENS
from ..kernels import probe
from .backend import AttentionBackend, result_of
from .fa3_splits import SplitShape, max_splits

if TYPE_CHECKING:
    from ...models.spec.model_spec import LayerView, ModelSpec
    from ..kernels.probe import KernelProbe
    from ..memory.io_buffers import InputBuffers
    from ..memory.kv_pool import KVPool
    from ..ops.rotation import LayerKV
    from .backend import BatchLayout, CapturableAttention, StepAttention

_MODULE: Final = "sgl_kernel.flash_attn"
_MAX_HEAD_DIM: Final = 256
_COMPILED_DIMS: Final = (64, 96, 128, 192, _MAX_HEAD_DIM)  # others are padded to the next one
_DTYPES: Final = (torch.bfloat16, torch.float16)
_WHOLE_PAGES_FROM: Final = ((128, 128, 64), (192, 96, 64), (_MAX_HEAD_DIM, 64, 32))
"""(head_dim up to, page size, a smaller one): the smallest block of keys, from which FA3 may load whole pages."""
_FP8: Final = torch.float8_e4m3fn
_MOST_FP8: Final = 448.0
_CAPABILITIES: Final = (8, 9)  # major versions for which the wheels have code
_NO_CAP: Final = 0.0
_ANY_SPLITS: Final = (
    0  # FA3 sets the bound; in a recording lengths are not known, and its few tokens cost little
)
_SMS_OF_NO_GPU: Final = 132


class FlashAttention3(AttentionBackend):
    """Attention backend for Hopper and Ampere GPUs; see the module."""

    name: ClassVar[str] = "fa3"

    @staticmethod
    def reasons_against(
        spec: ModelSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> list[str]:
        reasons = []
        if device.type != "cuda":
            reasons.append(f"needs a CUDA device, not {device.type}")
        else:
            reasons += _reasons_against_package(probe.probe_kernels(), spec.head_dims)
        reasons += [
            f"head_dim is {head_dim}, it must be a multiple of 8 and at most {_MAX_HEAD_DIM}"
            for head_dim in spec.head_dims
            if head_dim > _MAX_HEAD_DIM or head_dim % 8
        ]
        if spec.attention.chunked:
            reasons.append("attends to windows, not to chunks")
        if spec.vision is not None and spec.vision.sees_whole:
            reasons.append("attends to earlier tokens only, and those of an image see all of it")
        if dtype not in _DTYPES:
            reasons.append(f"computes in bfloat16 and float16, not in {_short(dtype)}")
        if kv_dtype == _FP8 and device.type == "cuda":
            reasons += _reasons_against_fp8(probe.probe_kernels(), spec.head_dims)
        elif kv_dtype != dtype:
            reasons.append(
                f"needs queries and keys in one precision, not {_short(dtype)} and {_short(kv_dtype)}"
            )
        return reasons

    @staticmethod
    def reasons_to_ask(dtype: torch.dtype, kv_dtype: torch.dtype) -> list[str]:
        return ["rounds queries to fp8 like the pool, so it must be requested"] if kv_dtype == _FP8 else []

    @staticmethod
    def reasons_against_pages(spec: ModelSpec, page_size: int) -> list[str]:
        """See `AttentionBackend`.

        Pages of whole blocks of keys are loaded with the values after a request's end, which are multiplied by 0. They
        must be finite, but a request whose numbers were not leaves NaN in the pages that others get next.
        """
        reasons = []
        for head_dim in spec.head_dims:
            limits = next((sizes for most, *sizes in _WHOLE_PAGES_FROM if head_dim <= most), None)
            if limits is not None and page_size >= limits[0]:
                reasons.append(
                    f"page_size is {page_size}, and from {limits[0]} on values that another request left in a page "
                    f"could reach this one (head_dim {head_dim}); use --page-size {limits[1]}"
                )
        return reasons

    def __init__(self, spec: ModelSpec, kv_pool: KVPool, req_to_token: Tensor, buffers: InputBuffers) -> None:
        package = import_module(_MODULE)
        self._get_metadata: Callable[..., Tensor] = package.get_scheduler_metadata
        self._flash_attention: Callable[..., Tensor] = package.flash_attn_with_kvcache
        self._req_to_token = req_to_token
        self._buffers = buffers
        self._page_size = kv_pool.page_size
        self._scale, self._cap = spec.score_scale, spec.attention.score_cap or _NO_CAP
        self._dtype = kv_pool.k[0].dtype
        self._pages = {
            layer_id: _in_pages(kv_pool.layer(layer_id), kv_pool.page_size)
            for layer_id in spec.attention_layers
        }
        self._causal = spec.causal
        self._num_sms = _SMS_OF_NO_GPU
        if req_to_token.is_cuda:
            self._num_sms = torch.cuda.get_device_properties(req_to_token.device).multi_processor_count
        self._views = [spec.view_of(layer_id) for layer_id in range(spec.num_layers)]
        # Query offsets of a step of rows with one new token each; longer than any, also where drafts are rows.
        most_rows = max(req_to_token.shape[0], MAX_DRAFT_STEP_TOKENS)
        self._one_each = torch.arange(most_rows + 1, dtype=torch.int32, device=req_to_token.device)

    def plan_step(self, layout: BatchLayout) -> StepAttention:
        seq_lens_np = (layout.prefix_lens + layout.extend_lens).astype(np.int32)
        cu_seqlens_np = np.zeros(len(layout.rows) + 1, dtype=np.int32)
        np.cumsum(layout.extend_lens, out=cu_seqlens_np[1:])
        rows, seq_lens, cu_seqlens = self._buffers.put_all([layout.rows, seq_lens_np, cu_seqlens_np])
        longest_query = int(layout.extend_lens.max(initial=1))
        splits = {
            view: max_splits(layout.extend_lens, layout.prefix_lens + layout.extend_lens, self._shape(view))
            for view in dict.fromkeys(self._views)
        }
        longest = int(seq_lens_np.max(initial=1))
        return self._plan(rows, seq_lens, cu_seqlens, longest_query, longest, splits)

    def capturable(self) -> CapturableAttention:
        return self

    def decode_step(self, rows: Tensor, seq_lens: Tensor) -> StepAttention:
        cu_seqlens = self._one_each[: len(rows) + 1]
        splits = dict.fromkeys(self._views, _ANY_SPLITS)
        return self._plan(rows, seq_lens, cu_seqlens, 1, self._req_to_token.shape[1], splits)

    def _shape(self, view: LayerView) -> SplitShape:
        heads = view.heads
        return SplitShape(heads.num_heads, heads.num_kv_heads, heads.head_dim, view.window, self._num_sms)

    def _plan(
        self,
        rows: Tensor,
        seq_lens: Tensor,
        cu_seqlens: Tensor,
        longest_query: int,
        longest: int,
        splits: Mapping[LayerView, int],
    ) -> StepAttention:
        """Plan a step.

        Args:
            longest: an upper bound of `seq_lens`; sets the width of the page table.
            splits: the most splits of each view.
        """
        page_table = self._page_table(rows, longest)
        # The kernel takes the table's width as the longest length; the metadata made before must agree with it.
        common: dict[str, Any] = {
            "batch_size": len(rows),
            "max_seqlen_q": longest_query,
            "max_seqlen_k": page_table.shape[1] * self._page_size,
            "cache_seqlens": seq_lens,
            "cu_seqlens_q": cu_seqlens,
            "page_size": self._page_size,
            "causal": self._causal,
            "has_softcap": self._cap > _NO_CAP,
            "qkv_dtype": self._dtype,
        }
        by_view = {view: self._view_arguments(view, common, num) for view, num in splits.items()}
        arguments = {
            "cache_seqlens": seq_lens,
            "page_table": page_table,
            "cu_seqlens_q": cu_seqlens,
            "max_seqlen_q": longest_query,
            "softmax_scale": self._scale,
            "softcap": self._cap,
            "causal": self._causal,
        }
        layers = [arguments | by_view[view] for view in self._views]
        return _Step(self._flash_attention, self._pages, layers)

    def _view_arguments(self, view: LayerView, common: dict[str, Any], num_splits: int) -> dict[str, Any]:
        """The arguments of the layers of one view; the metadata are made with those of all."""
        window, metadata = _window_size(view.window, causal=self._causal), None
        if common["batch_size"]:
            heads = {
                "num_heads": view.heads.num_heads,
                "num_heads_k": view.heads.num_kv_heads,
                "headdim": view.heads.head_dim,
            }
            metadata = self._get_metadata(**common, **heads, window_size=window, num_splits=num_splits)
        return {"window_size": window, "scheduler_metadata": metadata, "num_splits": num_splits}

    def _page_table(self, rows: Tensor, longest: int) -> Tensor:
        """[B, pages] int32. After the end of a request it holds pages of other requests, which are not read."""
        first_slots = self._req_to_token[:, : longest : self._page_size]
        table = first_slots.index_select(0, rows)
        return table if self._page_size == 1 else table.div_(self._page_size, rounding_mode="floor")


def _reasons_against_package(probe: KernelProbe, head_dims: Sequence[int]) -> list[str]:
    if probe.sgl_kernel.version is None:
        return [f"sgl_kernel: {probe.sgl_kernel.reason}"]
    if probe.capability[0] not in _CAPABILITIES:
        return [
            f"is built for compute capabilities 8.x and 9.0, this GPU has {'.'.join(map(str, probe.capability))}"
        ]
    try:  # a separate library, which some wheels do not contain
        import_module(_MODULE)
    except (ImportError, OSError) as error:
        return [f"sgl_kernel {probe.sgl_kernel.version} does not contain it: {error}"]
    if probe.flash_dims is None:
        return []
    why = f" ({probe.flash_error})" if probe.flash_error else ""
    return [
        f"sgl_kernel {probe.sgl_kernel.version} has no code for head_dim {head_dim} on this GPU{why}"
        for head_dim in head_dims
        if next((dim for dim in _COMPILED_DIMS if head_dim <= dim), head_dim) not in probe.flash_dims
    ]


def _reasons_against_fp8(probe: KernelProbe, head_dims: Sequence[int]) -> list[str]:
    missing = [head_dim for head_dim in head_dims if head_dim not in probe.flash_fp8_dims]
    return [f"has no code on this GPU for fp8 KV and head_dim {head_dim}" for head_dim in missing]


def _window_size(window: int | None, *, causal: bool) -> tuple[int, int]:
    """Number of keys before and after the query's own; -1: all."""
    if window is None:
        return -1, -1
    return (window - 1, 0) if causal else (window // 2, window // 2)


def _in_pages(kv: LayerKV, page_size: int) -> tuple[Tensor, Tensor]:
    """A layer's keys and values as [pages, page size, H, D]."""
    keys, values = (pool.view(-1, page_size, *pool.shape[1:]) for pool in kv[:2])
    return keys, values


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class _Step:
    """The pages of each layer, keys and values as [pages, page size, H, D], and the other arguments of its call."""

    flash_attention: Callable[..., Tensor]
    pages: Mapping[int, tuple[Tensor, Tensor]]
    arguments: list[dict[str, Any]]

    def forward(
        self, layer_id: int, q: Tensor, sinks: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """The kernel takes sinks in bfloat16."""
        if q.shape[0] == 0:
            return result_of(q)
        keys, values = self.pages[layer_id]
        if keys.dtype == _FP8:  # the result is in bfloat16; a conversion without a limit would give NaN
            q = q.clamp(-_MOST_FP8, _MOST_FP8).to(_FP8)
        arguments = self.arguments[layer_id]
        if sinks is not None:
            arguments = {**arguments, "sinks": sinks.to(torch.bfloat16)}
        if out is None:
            return self.flash_attention(q, keys, values, **arguments).flatten(1)
        result = self.flash_attention(q, keys, values, **arguments, out=out.view(q.shape))
        if result.data_ptr() != out.data_ptr():
            out.copy_(result.flatten(1))
        return out
