"""`CompressedLinear`: products with bfloat16 weights that take 12 bits a number, without loss (`cpu/compressed.h`)."""

# Shapes: T tokens, K inputs, N outputs.

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .native_product import NativeProduct


class CompressedLinear(NativeProduct):
    """What a `NativeLinear` is, to the bit, of three quarters of its bytes."""

    kind = NativeProduct.COMPRESSED

    def __init__(
        self, library: ctypes.CDLL, packed: Tensor, outputs: int, inputs: int, num_bytes: int
    ) -> None:
        """Take the numbers of a packed weight.

        Args:
            packed: the weight [N, K] as a `NativeLinear` has it; not kept.
            num_bytes: what the library's `compressed_linear_bytes` says of it; not 0.
        """
        super().__init__(library, outputs, inputs)
        self._compress(packed, num_bytes)

    def _compress(self, packed: Tensor, num_bytes: int) -> None:
        self._allocate(num_bytes)
        self._library.compress_linear(packed.data_ptr(), self._outputs, self._inputs, self._address)

    def _multiply(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        self._library.compressed_linear_to(*self._arguments(x, bias, out))

    def _pair(self) -> None:
        """Exponents belong to panels, and outputs change theirs."""
        shape = self._outputs, self._inputs
        packed = torch.empty(self._library.packed_linear_bytes(*shape), dtype=torch.uint8)
        self._library.decompress_linear(self._address, *shape, packed.data_ptr())
        self._library.pair_linear(packed.data_ptr(), *shape)
        self._compress(packed, self._library.compressed_linear_bytes(packed.data_ptr(), *shape))

    def _take_rows(self, ids: Tensor, out: Tensor) -> None:
        self._library.compressed_linear_rows(
            self._address, ids.data_ptr(), out.data_ptr(), len(ids), self._inputs, self._outputs
        )
