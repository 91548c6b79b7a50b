"""`NativeLinear`: matmuls with weights that are packed once for the C++ kernels (`kernels/cpu/linear.cpp`)."""

# Shapes: T tokens, K inputs, N outputs.

from __future__ import annotations

import ctypes
import logging
from typing import TYPE_CHECKING, Final, assert_never

import torch
from torch import Tensor

from ..ops.linear import LinearWeight
from . import plain
from .cpu.library import loaded_isa, reasons_against_library
from .native_matmul import NativeMatmul

if TYPE_CHECKING:
    from ..ops.linear import PackLinear
    from .cpu.compiler import Isa

logger = logging.getLogger(__name__)


def reasons_against_compression(isa: Isa) -> list[str]:
    """Reason why bfloat16 weights keep 16 bits per value on this ISA target; empty: they are compressed.

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
        case "amx" | "avx2_vnni" | "avx2" | "neon_bf16" | "neon_i8mm" | "neon_dot" | "neon" | "portable":
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


CPU = torch.device("cpu")
_WORTH_COMPRESSING: Final = 0.8
"""Limit on compressed bytes / packed bytes: a weight that compresses less stays uncompressed."""


def reasons_against_native_linear(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Reason why the C++ kernel should not be used here. In float32 it has no advantage over oneDNN."""
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


class PackReport:
    """A `PackLinear` that wraps another one and counts its results."""

    def __init__(self, pack: PackLinear) -> None:
        self._pack = pack
        self._compressed: list[CompressedLinear] = []
        self._plain_bytes = 0  # bytes of the compressed weights before compression
        self._has_plain = False  # whether some native weights keep 16 bits per value

    def __call__(self, weight: Tensor) -> LinearWeight:
        plain_bytes = weight.nbytes
        packed = self._pack(weight)
        if isinstance(packed, CompressedLinear):
            self._compressed.append(packed)
            self._plain_bytes += plain_bytes
        self._has_plain |= isinstance(packed, NativeLinear)
        return packed

    def log(self) -> None:
        """Log how many weights are compressed and the memory saved, or why the native weights are not compressed."""
        if self._compressed:
            logger.info(
                "weights_compressed=%d compressed_mib=%d instead of %d, without loss",
                len(self._compressed),
                sum(packed.num_bytes for packed in self._compressed) >> 20,
                self._plain_bytes >> 20,
            )
        elif self._has_plain and (reasons := reasons_against_compression(loaded_isa())):
            logger.info("weights_compressed=none: %s", "; ".join(reasons))
