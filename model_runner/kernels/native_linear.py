"""`NativeLinear`: matmuls with weights that are packed once for the C++ kernels (`kernels/cpu/linear.cpp`)."""

# Shapes: T tokens, K inputs, N outputs.

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from ..ops.linear import LinearWeight
from . import plain
from .compressed_linear import CompressedLinear
from .cpu.library import reasons_against_library
from .native_matmul import NativeMatmul

CPU = torch.device("cpu")
_WORTH_COMPRESSING: Final = 0.8
"""Limit on compressed bytes / packed bytes: a weight that compresses less stays uncompressed."""


def reasons_against_native_linear(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Why the C++ kernel should not be used here. In float32 it has no advantage over oneDNN."""
    if device.type != "cpu":
        return [f"runs on CPUs only, not on {device.type}"]
    if dtype != torch.bfloat16:
        return [f"packs bfloat16 only, not {dtype}"]
    return reasons_against_library()


def pack_native_linear(library: ctypes.CDLL, weight: Tensor, *, compress: bool) -> LinearWeight:
    """A weight with an odd number of inputs, or in float32, takes oneDNN or torch.

    Args:
        compress: return a `CompressedLinear` for a bfloat16 weight if the library supports it and it saves enough.
    """
    if weight.shape[1] % 2 == 0 and weight.dtype == torch.bfloat16:
        linear = NativeLinear(library, weight)
        return (linear.compressed() if compress else None) or linear
    if plain.reasons_against_onednn(CPU, weight.dtype):
        return plain.pack_linear(weight)
    return plain.pack_linear_onednn(weight)


class NativeLinear(NativeMatmul):
    """A bfloat16 weight [N, K]; K must be even."""

    kind = NativeMatmul.PACKED

    def __init__(self, library: ctypes.CDLL, weight: Tensor) -> None:
        assert weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0, (weight.dtype, weight.shape)
        outputs, inputs = weight.shape
        packed = torch.empty(library.packed_linear_bytes(outputs, inputs), dtype=torch.uint8)
        weight = weight.contiguous()
        library.pack_linear(weight.data_ptr(), outputs, inputs, packed.data_ptr())
        super().__init__(library, outputs, inputs, packed)

    def compressed(self) -> CompressedLinear | None:
        """The same weight in fewer bytes; None if it saves too little or this ISA target has no kernel for it."""
        assert not self.fuses_silu_and_mul, "pairing has moved outputs to other panels"
        shape = self._outputs, self._inputs
        num_bytes = self._library.compressed_linear_bytes(self._address, *shape)
        if not 0 < num_bytes <= _WORTH_COMPRESSING * self.num_bytes:
            return None
        return CompressedLinear(self._library, self._packed, *shape, num_bytes)

    def _multiply(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        self._library.linear_to(*self._arguments(x, bias, out))

    def _pair(self) -> None:
        self._library.pair_linear(self._address, self._outputs, self._inputs)

    def _take_rows(self, ids: Tensor, out: Tensor) -> None:
        self._library.linear_rows(
            self._address, ids.data_ptr(), out.data_ptr(), len(ids), self._inputs, self._outputs
        )
