"""Latent attention's matrix for each head and its store, by the C++ kernels for the CPU and in plain torch.

The kernels are `kernels/cpu/head_matmul.cpp` and `kernels/cpu/store_latent.cpp`; the bits of a token's result do not
depend on the other tokens of the batch.
"""

# Shapes: see `ops`; K size of a latent or inputs of a head.

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from ..ops.linear import HeadMatmul
from ..ops.rotation import RotaryStore
from . import plain
from .cpu.library import load_library

_DTYPES: Final = (torch.bfloat16, torch.float32)


class NativeHeadMatmul:
    """A bfloat16 matrix [N, K] for each head; K must be even."""

    def __init__(self, library: ctypes.CDLL, weight: Tensor) -> None:
        assert weight.dtype == torch.bfloat16 and weight.shape[2] % 2 == 0, (weight.dtype, weight.shape)
        self._library = library
        self._num_heads, self._outputs, self._inputs = weight.shape
        num_bytes = library.packed_linear_bytes(self._outputs, self._inputs)
        self._packed = torch.empty((self._num_heads, num_bytes), dtype=torch.uint8)
        for head, packed in zip(weight, self._packed, strict=True):
            head = head.contiguous()
            library.pack_linear(head.data_ptr(), self._outputs, self._inputs, packed.data_ptr())

    def __call__(self, x: Tensor, out: Tensor) -> None:
        assert x.dtype == out.dtype == torch.bfloat16, (x.dtype, out.dtype)
        assert x.shape == (len(x), self._num_heads, self._inputs) and x.stride(2) == 1, x.shape
        assert out.shape == (len(x), self._num_heads, self._outputs) and out.stride(2) == 1, out.shape
        self._library.head_matmul(
            x.data_ptr(),
            x.stride(0),
            x.stride(1),
            self._packed.data_ptr(),
            self._packed.shape[1],
            out.data_ptr(),
            out.stride(0),
            out.stride(1),
            len(x),
            self._num_heads,
            self._inputs,
            self._outputs,
        )


class NativeLatentOps:
    """The operations, bound to a loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def pack_heads(self, weight: Tensor) -> HeadMatmul:
        """Matrices with an odd number of inputs, or in float32, take torch."""
        if weight.dtype == torch.bfloat16 and weight.shape[2] % 2 == 0:
            return NativeHeadMatmul(self._library, weight)
        return pack_heads(weight)

    def store_latent(
        self, q: Tensor, q_out: Tensor, row: Tensor, norm: tuple[Tensor, float], store: RotaryStore
    ) -> None:
        kv, out_cache_loc = store.kv, store.out_cache_loc
        assert kv is not None
        weight, eps = norm
        num_tokens, num_heads, rotary_dim = q.shape
        row, cos, sin = row.contiguous(), store.cos.contiguous(), store.sin.contiguous()
        row_size = len(weight) + rotary_dim
        known = (q.dtype, torch.float32)
        assert q.dtype in _DTYPES and q.dtype == q_out.dtype == row.dtype == kv.k.dtype, (q.dtype, kv.k.dtype)
        assert q_out.shape == q.shape and q.stride(2) == q_out.stride(2) == 1, (q.shape, q_out.shape)
        assert row.shape == (num_tokens, row_size) and kv.k.shape[1:] == (1, row_size), (
            row.shape,
            kv.k.shape,
        )
        assert cos.shape == sin.shape == (num_tokens, rotary_dim), (cos.shape, sin.shape)
        assert cos.dtype == sin.dtype and cos.dtype in known and weight.dtype in known, cos.dtype
        assert kv.k.is_contiguous() and weight.is_contiguous()
        assert out_cache_loc.dtype == torch.int64 and out_cache_loc.is_contiguous(), out_cache_loc.dtype
        assert len(out_cache_loc) == num_tokens, out_cache_loc.shape
        self._library.store_latent(
            q.data_ptr(),
            q.stride(0),
            q.stride(1),
            q_out.data_ptr(),
            q_out.stride(0),
            q_out.stride(1),
            row.data_ptr(),
            weight.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            kv.k.data_ptr(),
            out_cache_loc.data_ptr(),
            num_tokens,
            num_heads,
            len(weight),
            rotary_dim,
            eps,
            store.interleaved,
            q.dtype == torch.bfloat16,
            cos.dtype == torch.bfloat16,
            weight.dtype == torch.bfloat16,
        )


def native_latent_ops() -> NativeLatentOps:
    """The operations for this CPU. Call only if `native.reasons_against_native` is empty."""
    return NativeLatentOps(load_library())


class PlainHeadMatmul:
    """One batched matmul, with the heads as batch."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.transpose(1, 2).contiguous()  # [Hq, K, N]

    def __call__(self, x: Tensor, out: Tensor) -> None:
        out.copy_(torch.bmm(x.transpose(0, 1), self._weight).transpose(0, 1))


def pack_heads(weight: Tensor) -> HeadMatmul:
    return PlainHeadMatmul(weight)


def store_latent(
    q: Tensor, q_out: Tensor, row: Tensor, norm: tuple[Tensor, float], store: RotaryStore
) -> None:
    cos, sin, kv, out_cache_loc, interleaved, *_ = store
    assert kv is not None
    weight, eps = norm
    latent, key = row.split((len(weight), cos.shape[-1]), dim=-1)
    heads, cos, sin = torch.cat((q, key.unsqueeze(1)), dim=1), cos.to(q.dtype), sin.to(q.dtype)
    rotated = plain.rotate(heads, cos.unsqueeze(1), sin.unsqueeze(1), interleaved=interleaved)
    q_out.copy_(rotated[:, :-1])
    whole = torch.cat((plain.rms_norm(latent.contiguous(), weight, eps), rotated[:, -1]), dim=-1)
    plain.store(kv.k, whole.unsqueeze(1), out_cache_loc)
