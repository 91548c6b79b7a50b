"""`NativeLinear`: products with weights that are packed once for our C++ kernels (`kernels/cpu/linear.cpp`)."""

# Shapes: T tokens, K inputs, N outputs.

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..ops import LinearWeight
from . import plain
from .cpu.library import reasons_against_library

CPU = torch.device("cpu")


def reasons_against_native_linear(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Why our product should not be used here. In float32 it has no advantage over oneDNN's."""
    if device.type != "cpu":
        return [f"runs on CPUs only, not on {device.type}"]
    if dtype != torch.bfloat16:
        return [f"packs bfloat16 only, not {dtype}"]
    if torch.cpu._is_amx_tile_supported() and not plain.reasons_against_onednn(CPU, dtype):
        return ["oneDNN's product uses this CPU's AMX, which is several times as fast for many tokens"]
    return reasons_against_library()


def pack_native_linear(library: ctypes.CDLL, weight: Tensor) -> LinearWeight:
    """See `PackLinear`. A weight with an odd number of inputs, or in float32, is oneDNN's or torch's."""
    if weight.shape[1] % 2 == 0 and weight.dtype == torch.bfloat16:
        return NativeLinear(library, weight)
    if plain.reasons_against_onednn(CPU, weight.dtype):
        return plain.pack_linear(weight)
    return plain.pack_linear_onednn(weight)


class NativeLinear:
    """A bfloat16 weight [N, K] packed for our product, which needs no other copy of it for any number of tokens."""

    def __init__(self, library: ctypes.CDLL, weight: Tensor) -> None:
        assert weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0, (weight.dtype, weight.shape)
        self._library = library
        self._outputs, self._inputs = weight.shape
        self._packed = torch.empty(
            library.packed_linear_bytes(self._outputs, self._inputs), dtype=torch.uint8
        )
        weight = weight.contiguous()
        library.pack_linear(weight.data_ptr(), self._outputs, self._inputs, self._packed.data_ptr())
        self._address = self._packed.data_ptr()

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `LinearWeight`."""
        return self._multiply(x, bias, torch.bfloat16)

    def to_float32(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The same product before it is rounded: [T, N] float32, as whoever samples wants his logits."""
        return self._multiply(x, bias, torch.float32)

    def rows(self, ids: Tensor) -> Tensor:
        """weight[ids], exactly as it was packed: an embedding that shares its weight needs no table of its own.

        Args:
            ids: [T] int64, 0 <= id < N: not checked, as memory beside the weight would be read.

        Returns:
            [T, K] bfloat16.
        """
        assert ids.dtype == torch.int64 and ids.dim() == 1, (ids.dtype, ids.shape)
        ids = ids.contiguous()
        out = torch.empty((len(ids), self._inputs), dtype=torch.bfloat16)
        self._library.linear_rows(
            self._address, ids.data_ptr(), out.data_ptr(), len(ids), self._inputs, self._outputs
        )
        return out

    @property
    def num_bytes(self) -> int:
        """Memory of the weight."""
        return self._packed.nbytes

    def _multiply(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        assert x.dtype == torch.bfloat16 and x.shape[1] == self._inputs, (x.dtype, x.shape)
        if bias is not None:
            assert bias.dtype == torch.bfloat16 and bias.shape == (self._outputs,), (bias.dtype, bias.shape)
            bias = bias.contiguous()
        if x.stride(1) != 1:
            x = x.contiguous()
        num_tokens = x.shape[0]
        out = x.new_empty((num_tokens, self._outputs), dtype=dtype)
        self._library.linear_to(
            x.data_ptr(),
            x.stride(0),
            self._address,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            num_tokens,
            self._inputs,
            self._outputs,
            dtype == torch.float32,
        )
        return out
