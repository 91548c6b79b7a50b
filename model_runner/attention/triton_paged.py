"""Attention by our own Triton kernels: slots are read directly from the pool, nothing is gathered.

Extends and decodes of a batch use one kernel each (`kernels/triton/attention_prefill`, `attention_decode`). The host
arrays of a step are uploaded in one copy; decodes are split into parts on the device.
"""

# Shapes: B requests, T new tokens in the batch, Hq query heads, H KV heads on this rank, D head dim.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from ...models.spec.model_spec import LayerView
from ..kernels import probe
from .backend import AttentionBackend, result_of

if TYPE_CHECKING:
    from ...models.spec.model_spec import ModelSpec
    from ..kernels.triton.attention_decode import DecodePlan
    from ..kernels.triton.attention_prefill import ExtendPlan
    from ..kernels.triton.attention_tiles import HeadShape
    from ..kernels.triton.extend_cut import ExtendCut
    from ..memory.io_buffers import InputBuffers
    from ..memory.kv_pool import KVPool
    from .backend import BatchLayout, CapturableAttention, Int64s, StepAttention

_MAX_HEAD_DIM: Final = 512
_MAX_GROUP: Final = 64
_WIDE_HEAD_DIM: Final = 256
_MAX_WIDE_GROUP: Final = 32  # of wider heads, whose tiles have fewer rows
_SMS_OF_NO_GPU: Final = 8  # in the interpreter: enough to split requests into parts
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_KV_DTYPES: Final = (*_DTYPES, torch.float8_e4m3fn)


class TritonAttention(AttentionBackend):
    """Attention backend by Triton kernels; see the module."""

    name: ClassVar[str] = "triton"

    @staticmethod
    def reasons_against(
        spec: ModelSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> list[str]:
        reasons = []
        if device.type != "cuda":
            reasons.append(f"needs a CUDA device, not {device.type}")
        elif (found := probe.probe_kernels().triton).version is None:
            reasons.append(f"triton: {found.reason}")
        if not spec.causal:
            reasons.append("attends to earlier tokens only, and the model is an encoder")
        for heads in dict.fromkeys(spec.heads_of(layer_id) for layer_id in range(spec.num_layers)):
            group = heads.num_heads // heads.num_kv_heads
            most = _MAX_GROUP if heads.head_dim <= _WIDE_HEAD_DIM else _MAX_WIDE_GROUP
            if heads.head_dim > _MAX_HEAD_DIM:
                reasons.append(f"head_dim is {heads.head_dim}, at most {_MAX_HEAD_DIM} fits")
            if group > most:
                reasons.append(f"{group} query heads share a KV head, at most {most} fit")
        if dtype not in _DTYPES:
            reasons.append(f"has no kernels for {dtype}")
        if kv_dtype not in _KV_DTYPES:
            reasons.append(f"reads no KV pool of {kv_dtype}")
        return reasons

    def __init__(self, spec: ModelSpec, kv_pool: KVPool, req_to_token: Tensor, buffers: InputBuffers) -> None:
        # Imported here: triton may be missing on machines without a GPU.
        from ..kernels.triton import attention_decode, attention_prefill, attention_tiles, extend_cut

        self._decode_kernels, self._prefill_kernels = attention_decode, attention_prefill
        self._cut_extends = extend_cut.cut_extends
        self._attention_inputs = attention_tiles.AttentionInputs
        device = req_to_token.device
        self._kv_pool = kv_pool
        self._req_to_token = req_to_token
        self._buffers = buffers
        page_size = kv_pool.page_size
        self._views = [spec.view_of(layer_id) for layer_id in range(spec.num_layers)]
        self._shapes = {
            heads: attention_tiles.HeadShape(
                heads.num_kv_heads, heads.num_heads // heads.num_kv_heads, heads.head_dim, page_size
            )
            for heads in dict.fromkeys(view.heads for view in self._views)
        }
        self._scores = attention_tiles.Scores(spec.score_scale, spec.attention.score_cap or 0.0)
        self._chunked = spec.attention.chunked
        self._by_hand = attention_tiles.converts_by_hand(device)
        self._kv_dtype = kv_pool.k[0].dtype
        self._num_sms = _SMS_OF_NO_GPU
        if device.type == "cuda":
            self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count

    def plan_step(self, layout: BatchLayout) -> StepAttention:
        split = layout.num_extends
        starts = np.cumsum(layout.extend_lens) - layout.extend_lens
        views = tuple(dict.fromkeys(self._views)) if split else ()
        longest = int(layout.extend_lens[:split].max(initial=1))
        shapes = [self._shapes[view.heads] for view in views]
        tile_rows = [self._prefill_kernels.rows_of_tile(shape, self._kv_dtype, longest) for shape in shapes]
        cuts = [
            self._cut(layout, starts, shape, rows, view)
            for view, shape, rows in zip(views, shapes, tile_rows, strict=True)
        ]
        seq_lens_np = (layout.prefix_lens + layout.extend_lens)[split:].astype(np.int32)
        ends = [] if layout.sees_to is None else [layout.sees_to.astype(np.int32)]
        req_rows, seq_lens, *arrays = self._buffers.put_all(
            [layout.rows[split:], seq_lens_np, *(array for cut in cuts for array in cut[:2]), *ends]
        )
        sees_to = arrays.pop() if ends else None
        extends = {
            view: self._prefill_kernels.make_plan(shape, cut, blocks, spans, rows, view, sees_to)
            for view, shape, cut, rows, blocks, spans in zip(
                views, shapes, cuts, tile_rows, arrays[::2], arrays[1::2], strict=True
            )
        }
        return _Step(
            self,
            [extends.get(view) for view in self._views],
            self._plan_decodes(req_rows, seq_lens),
            int(layout.extend_lens[:split].sum()),
        )

    def _cut(
        self, layout: BatchLayout, starts: Int64s, shape: HeadShape, tile_rows: int, view: LayerView
    ) -> ExtendCut:
        extends = slice(layout.num_extends)
        return self._cut_extends(
            starts[extends],
            layout.rows[extends],
            layout.prefix_lens[extends],
            layout.extend_lens[extends],
            tile_rows // shape.group,
            view.window,
            -(-self._num_sms // shape.num_kv_heads),
            chunked=view.chunked,
            sees_to=None if view.causal_images else layout.sees_to,
        )

    def capturable(self) -> CapturableAttention:
        return self

    def decode_step(self, rows: Tensor, seq_lens: Tensor) -> StepAttention:
        return _Step(self, [None] * len(self._views), self._plan_decodes(rows, seq_lens), 0)

    def _plan_decodes(self, rows: Tensor, seq_lens: Tensor) -> list[DecodePlan | None]:
        """Decode plan of each layer; None where there are no decodes."""
        if len(rows) == 0:
            return [None] * len(self._views)
        plans: dict[LayerView, DecodePlan] = {}
        for heads, shape in self._shapes.items():
            views = {view.window: view for view in self._views if view.heads == heads}
            planned = self._decode_kernels.plan_decodes(
                shape, rows, seq_lens, tuple(views), self._kv_dtype, self._num_sms, chunked=self._chunked
            )
            plans |= {views[window]: plan for window, plan in planned.items()}
        return [plans[view] for view in self._views]

    def attend(
        self,
        layer_id: int,
        q: Tensor,
        sinks: Tensor | None,
        extends: ExtendPlan | None,
        decodes: DecodePlan | None,
        split: int,
        out: Tensor | None,
    ) -> Tensor:
        """[T, Hq, D] -> [T, Hq * D], for a step planned by this backend; its decodes begin at token `split`."""
        if q.stride(2) != 1:
            q = q.contiguous()
        if out is None:
            out = result_of(q)
        kv, table = self._kv_pool.layer(layer_id), self._req_to_token
        shape = self._shapes[self._views[layer_id].heads]
        inputs = self._attention_inputs(shape, q, kv, table, out, self._scores, self._by_hand, sinks)
        if extends is not None:
            self._prefill_kernels.attend_extend(inputs, extends)
        if decodes is not None:
            decoded = inputs._replace(q=q[split:], out=out[split:]) if split else inputs
            self._decode_kernels.attend_decode(decoded, decodes)
        return out


@dataclass(frozen=True, slots=True)
class _Step:
    """Plans of each layer for extends and for decodes, None without any; decodes begin at token `split`."""

    backend: TritonAttention
    extends: list[ExtendPlan | None]
    decodes: list[DecodePlan | None]
    split: int

    def forward(
        self, layer_id: int, q: Tensor, sinks: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        return self.backend.attend(
            layer_id, q, sinks, self.extends[layer_id], self.decodes[layer_id], self.split, out
        )
