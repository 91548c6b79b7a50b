"""`CompressedLinear`: matmuls with bfloat16 weights stored losslessly in 12 bits per value (`cpu/compressed.h`).

`reasons_against_compression` decides where weights are compressed.
"""

# Shapes: T tokens, K inputs, N outputs.

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, assert_never

import torch
from torch import Tensor

from .native_matmul import NativeMatmul

if TYPE_CHECKING:
    from .cpu.isa import Isa


def reasons_against_compression(isa: Isa) -> list[str]:
    """Why bfloat16 weights keep 16 bits per value with the kernels of this ISA target; empty: they are compressed.

    Matmuls of both forms give the same bits, so the choice affects speed only. Unpacking costs arithmetic; reading
    fewer bytes saves memory time: `python benchmarks/cpu_kernels.py --what compressed --isa ISA` measures both.
    """
    match isa:
        case "avx512_bf16":
            return []
        case "avx512_vnni" | "avx512":
            return [
                f"without bfloat16 instructions ({isa}) matmuls of 7 and more tokens take longer with 12-bit weights"
            ]
        case "amx" | "avx2_vnni" | "avx2" | "portable":
            return [f"no kernel multiplies with 12-bit weights on {isa}"]
        case _:
            assert_never(isa)


class CompressedLinear(NativeMatmul):
    """The same results as `NativeLinear`, bit for bit, with three quarters of its bytes."""

    kind = NativeMatmul.COMPRESSED

    def __init__(
        self, library: ctypes.CDLL, packed: Tensor, outputs: int, inputs: int, num_bytes: int
    ) -> None:
        """Compress a packed weight.

        Args:
            packed: the weight [N, K] as `NativeLinear` packs it; not kept.
            num_bytes: the result of `compressed_linear_bytes` for this weight; not 0.
        """
        super().__init__(library, outputs, inputs, _compressed(library, packed, (outputs, inputs), num_bytes))

    def _multiply(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        self._library.compressed_linear_to(*self._arguments(x, bias, out))

    def _pair(self) -> None:
        """Decompress, pair, compress again: exponents belong to panels, and pairing moves outputs to other panels."""
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
    """The compressed form, `num_bytes` bytes, of a packed weight of shape (N, K)."""
    compressed = torch.empty(num_bytes, dtype=torch.uint8)
    library.compress_linear(packed.data_ptr(), *shape, compressed.data_ptr())
    return compressed
