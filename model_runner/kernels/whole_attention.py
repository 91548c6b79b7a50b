"""`WholeAttention` by the C++ kernels for the CPU, which read keys and values where the product has left them, and by
torch.

The kernels are those of paged attention (`kernels/cpu/attention.cpp`): row t of [T, 3, H, D] has its key in slot 3t of
a pool that begins at the first key, and its value in the same slot of one that begins at the first value.
"""

# Shapes: see `ops.whole_attention`.

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .cpu.library import load_library

if TYPE_CHECKING:
    from ..ops.whole_attention import MakeWholeAttention

_DTYPES: Final = (torch.bfloat16, torch.float32)
_HEAD_DIM_MULTIPLE: Final = 16  # one vector of the kernels


class NativeWholeAttention:
    """A `WholeAttention` with one plan, which each call fills again.

    Heads of a size that the kernels do not take are padded with zeros, in a copy.
    """

    def __init__(self, library: ctypes.CDLL, num_heads: int, head_dim: int, scale: float) -> None:
        self._library = library
        self._num_heads, self._head_dim, self._scale = num_heads, head_dim, scale
        self._padding = -head_dim % _HEAD_DIM_MULTIPLE
        self._slots = np.empty(0, dtype=np.int32)
        self._plan: int | None = None

    def padded(self, qkv: Tensor) -> Tensor:
        heads = qkv.view(len(qkv), 3, self._num_heads, self._head_dim)
        return F.pad(heads, (0, self._padding)) if self._padding else heads.contiguous()

    def __call__(self, qkv: Tensor, lengths: Sequence[int] | None = None, at: slice | None = None) -> Tensor:
        num_rows = len(qkv)
        first, stop = (0, num_rows) if at is None else (at.start, at.stop)
        head_dim = self._head_dim + self._padding
        assert qkv.dtype in _DTYPES and qkv.shape == (num_rows, 3, self._num_heads, head_dim), qkv.shape
        assert qkv.is_contiguous() and (at is None or lengths is None), (lengths, at)
        lens = np.array([stop - first] if lengths is None else lengths, dtype=np.int64)
        assert lens.sum() == stop - first, (lengths, num_rows)
        rows, none = np.cumsum(lens) - lens, np.zeros_like(lens)
        before = none + (num_rows - lens if lengths is None else 0)
        plan = self._plan_for(num_rows)
        # The rows that attend are the last ones of their run: each of them sees those before.
        order = np.r_[0:first, stop:num_rows, first:stop] if before.any() else np.arange(num_rows)
        self._slots[:num_rows] = 3 * order
        addresses = [column.ctypes.data for column in (rows, before, lens, none)]
        self._library.plan_attention(plan, *addresses, None, len(lens))
        out = qkv.new_empty((stop - first, self._num_heads, head_dim))
        size = self._num_heads * head_dim * qkv.element_size()
        key, value = qkv.data_ptr() + size, qkv.data_ptr() + 2 * size
        self._library.attend(
            plan,
            qkv[first:].data_ptr(),
            qkv.stride(0),
            key,
            value,
            None,
            None,
            None,
            out.data_ptr(),
            qkv.dtype == torch.bfloat16,
        )
        return out[..., : self._head_dim].reshape(stop - first, -1)

    def _plan_for(self, num_rows: int) -> int:
        """A plan over a table of slots in which each row of qkv is a row, too: a run begins at any of them."""
        if self._plan is not None and num_rows <= len(self._slots):
            return self._plan
        self._slots = np.empty(num_rows, dtype=np.int32)
        width = page_size = group = 1
        window = chunked = causal = fixed_order = 0
        plan: int = self._library.new_attention_plan(
            self._slots.ctypes.data,
            width,
            page_size,
            self._num_heads,
            group,
            self._head_dim + self._padding,
            window,
            chunked,
            causal,
            fixed_order,
            self._scale,
            0.0,
        )
        weakref.finalize(self, self._library.free_attention_plan, plan).atexit = False
        self._plan = plan
        return plan


def native_whole_attention() -> MakeWholeAttention:
    """For this CPU. Call only if `native.reasons_against_native` is empty."""
    return partial(NativeWholeAttention, load_library())


class TorchWholeAttention:
    """A `WholeAttention` by torch's own, run by run."""

    def __init__(self, num_heads: int, head_dim: int, scale: float) -> None:
        self._shape, self._scale = (3, num_heads, head_dim), scale

    def padded(self, qkv: Tensor) -> Tensor:
        return qkv.view(len(qkv), *self._shape)

    def __call__(self, qkv: Tensor, lengths: Sequence[int] | None = None, at: slice | None = None) -> Tensor:
        assert qkv.shape[1:] == self._shape, qkv.shape
        assert at is None or lengths is None, (lengths, at)
        runs = qkv.split(len(qkv) if lengths is None else list(lengths))
        parts = []
        for run in runs:
            q, k, v = run.permute(1, 2, 0, 3)[:, None]
            q = q if at is None else q[:, :, at]
            attended = F.scaled_dot_product_attention(q, k, v, scale=self._scale)[0]
            parts.append(attended.transpose(0, 1).reshape(q.shape[2], -1))
        return torch.cat(parts)
