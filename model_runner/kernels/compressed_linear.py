"""`CompressedLinear`: products with bfloat16 weights that take 12 bits a number, without loss (`cpu/compressed.h`).

`reasons_against_compression` decides where weights are compressed.
"""

# Shapes: T tokens, K inputs, N outputs.

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, assert_never

import torch
from torch import Tensor

from .native_product import NativeMatmul

if TYPE_CHECKING:
    from .cpu.isa import Isa


def reasons_against_compression(isa: Isa) -> list[str]:
    """Why bfloat16 weights keep 16 bits a number with the kernels of this level; none: they are compressed.

    The products of both forms have the same bits, so this is a matter of speed alone. Unpacking costs arithmetic, and
    reading less saves time on memory: `python benchmarks/compressed_weights.py --isa ISA` measures both.
    """
    match isa:
        case "avx512_bf16":
            return []
        case "avx512_vnni" | "avx512":
            return [
                f"without bfloat16 instructions ({isa}) products of 7 and more tokens take longer with 12-bit weights"
            ]
        case "amx" | "avx2_vnni" | "avx2" | "portable":
            return [f"there are no products with 12-bit weights for {isa}"]
        case _:
            assert_never(isa)


class CompressedLinear(NativeMatmul):
    """What a `NativeLinear` is, to the bit, of three quarters of its bytes."""

    kind = NativeMatmul.COMPRESSED

    def __init__(
        self, library: ctypes.CDLL, packed: Tensor, outputs: int, inputs: int, num_bytes: int
    ) -> None:
        """Take the numbers of a packed weight.

        Args:
            packed: the weight [N, K] as a `NativeLinear` has it; not kept.
            num_bytes: what the library's `compressed_linear_bytes` says of it; not 0.
        """
        super().__init__(library, outputs, inputs, _compressed(library, packed, (outputs, inputs), num_bytes))

    def _multiply(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        self._library.compressed_linear_to(*self._arguments(x, bias, out))

    def _pair(self) -> None:
        """Exponents belong to panels, and outputs change theirs."""
        shape = self._outputs, self._inputs
        packed = torch.empty(self._library.packed_linear_bytes(*shape), dtype=torch.uint8)
        self._library.decompress_linear(self._address, *shape, packed.data_ptr())
        self._library.pair_linear(packed.data_ptr(), *shape)
        num_bytes = self._library.compressed_linear_bytes(packed.data_ptr(), *shape)
        self._keep(_compressed(self._library, packed, shape, num_bytes))

    def _take_rows(self, ids: Tensor, out: Tensor) -> None:
        self._library.compressed_linear_rows(
            self._address, ids.data_ptr(), out.data_ptr(), len(ids), self._inputs, self._outputs
        )


def _compressed(library: ctypes.CDLL, packed: Tensor, shape: tuple[int, int], num_bytes: int) -> Tensor:
    """The numbers of a packed weight, (N, K), in so many bytes."""
    compressed = torch.empty(num_bytes, dtype=torch.uint8)
    library.compress_linear(packed.data_ptr(), *shape, compressed.data_ptr())
    return compressed
