"""`sgl_kernel.flash_attn` in plain torch: the same signatures, checks and results, on the CPU.

What it insists on is what FA3's C++ insists on, and one thing more: that the metadata of a call were made for that very
call.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.model_runner.attention.paged_batches import dense
from tests.model_runner.kernels import sgl_signatures


class FakeFlashAttention:
    """The module's two functions, held to the signatures of one release.

    Attributes:
        module: to stand in for `sgl_kernel.flash_attn`.
        num_plans: calls of `get_scheduler_metadata`.
        num_calls: calls of `flash_attn_with_kvcache`.
    """

    def __init__(self, version: str) -> None:
        self._signatures = {
            name: sgl_signatures.function(version, f"flash_attn.{name}")
            for name in ("flash_attn_with_kvcache", "get_scheduler_metadata")
        }
        self.num_plans = self.num_calls = 0
        self.module = SimpleNamespace(
            flash_attn_with_kvcache=self._attention, get_scheduler_metadata=self._metadata
        )
        self._planned: dict[int, dict[str, Any]] = {}

    def _bind(self, name: str, args: Any, kwargs: Any) -> dict[str, Any]:
        bound = self._signatures[name].bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def _metadata(self, *args: Any, **kwargs: Any) -> Tensor:
        given = self._bind("get_scheduler_metadata", args, kwargs)
        self.num_plans += 1
        check_int32(given["cache_seqlens"], given["batch_size"])
        check_int32(given["cu_seqlens_q"], given["batch_size"] + 1)
        ticket = torch.tensor([self.num_plans], dtype=torch.int32)
        self._planned[self.num_plans] = given
        return ticket

    def _attention(self, *args: Any, **kwargs: Any) -> Tensor:
        given = self._bind("flash_attn_with_kvcache", args, kwargs)
        self.num_calls += 1
        q, keys, values = given["q"], given["k_cache"], given["v_cache"]
        page_table, seq_lens, starts = given["page_table"], given["cache_seqlens"], given["cu_seqlens_q"]
        num_requests, page_size = page_table.shape[0], keys.shape[1]
        assert q.dtype == keys.dtype == values.dtype
        assert all(tensor.stride(-1) == 1 for tensor in (q, keys, values))
        assert page_table.dtype == torch.int32
        assert page_table.stride(-1) == 1
        assert 0 <= int(page_table.min()) <= int(page_table.max()) < keys.shape[0]
        check_int32(seq_lens, num_requests)
        check_int32(starts, num_requests + 1)
        causal = given["causal"]
        new_lens = starts.diff().tolist()
        assert int(starts[-1]) == q.shape[0]
        assert given["max_seqlen_q"] >= max(new_lens)
        assert page_table.shape[1] * page_size >= int(seq_lens.max())
        planned = self._planned[int(given["scheduler_metadata"])]
        assert planned["batch_size"] == num_requests
        assert planned["max_seqlen_k"] == page_table.shape[1] * page_size
        assert (planned["num_heads"], planned["headdim"]) == q.shape[1:]
        assert planned["num_heads_k"] == keys.shape[2]
        assert planned["qkv_dtype"] == q.dtype
        assert planned["page_size"] == page_size
        assert planned["has_softcap"] == (given["softcap"] > 0.0)
        sinks = given["sinks"]
        assert sinks is None or (sinks.dtype == torch.bfloat16 and sinks.shape == (q.shape[1],))
        for name in ("max_seqlen_q", "cu_seqlens_q", "cache_seqlens", "causal", "window_size", "num_splits"):
            assert planned[name] is given[name] or planned[name] == given[name], name

        left, right = given["window_size"]
        assert right == (-1 if left == -1 else 0 if causal else left)
        out = []
        for pages, length, queries in zip(page_table, seq_lens.tolist(), q.split(new_lens), strict=True):
            mine = pages[: -(-length // page_size)].long()
            k, v = keys[mine].flatten(0, 1)[:length], values[mine].flatten(0, 1)[:length]
            window = None if left == -1 else left + right + 1
            scores = (given["softmax_scale"], given["softcap"] or None, sinks)
            out.append(dense(queries, k, v, window, *scores, causal=causal))
        result = torch.cat(out).view(q.shape).to(torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype)
        memory: Tensor | None = given["out"]
        if memory is None:
            return result
        assert (memory.shape, memory.dtype, memory.stride(-1)) == (result.shape, result.dtype, 1)
        return memory.copy_(result)


def check_int32(tensor: Tensor, length: int) -> None:
    assert tensor.dtype == torch.int32
    assert tensor.shape == (length,)
    assert tensor.is_contiguous()
