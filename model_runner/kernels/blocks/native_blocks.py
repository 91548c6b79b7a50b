"""`NativeBlockLinear`: matmuls with block-quantized weights, by the C++ kernels (`kernels/cpu/blocks.cpp`).

For few tokens the activations are quantized, too: each block of 32 becomes integers in -127..127 with one scale, or two
neighboring blocks share one if the scales of an 8-bit weight are equal in pairs. Accumulation is exact within a block
and float32 across blocks, in a fixed order. From `tiles_from` tokens on, on a CPU with AMX, activations keep their
dtype and the weight is converted to bfloat16 panel by panel. The bits of a token's result therefore depend only on
whether its call has at least `tiles_from` tokens; `NO_TILES` removes that dependence.
"""

# Shapes: T tokens, K inputs, N outputs.

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from ..cpu.library import load_library, reasons_against_library
from ..native_matmul import NativeMatmul
from ..quantized_weights import BLOCK_SIZE
from .packed_blocks import pack

if TYPE_CHECKING:
    from ...memory.huge_pages import WeightMemory
    from ..quantized_weights import BlockWeight
    from .stored_rows import StoredRows

TILES_FROM: Final = 32
"""With fewer tokens some shapes are slower with AMX tiles; from this number on no shape is."""
NO_TILES: Final = 2**62
"""Larger than the number of tokens of any call: AMX tiles are never used."""


def reasons_against_native_blocks(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> list[str]:
    """Reason why the kernel cannot take a weight of shape (N, K) on this device and dtype, or should not."""
    if device.type != "cpu":
        return [f"runs on CPUs only, not on {device.type}"]
    reasons = []
    if dtype != torch.bfloat16:
        reasons.append(f"computes in bfloat16 only, not in {dtype}")
    if shape[1] % BLOCK_SIZE:
        reasons.append(f"needs inputs in blocks of {BLOCK_SIZE}, not {shape[1]} of them")
    if not (against_library := reasons_against_library()) and not load_library().blocks_are_fast():
        reasons.append("this CPU has no AVX2 to multiply bytes with")
    return reasons + against_library


class NativeBlockLinear(NativeMatmul):
    """A block-quantized weight [N, K].

    Scales and minima are rounded to half precision, in which most formats store them; where they differ by more than
    2^29 within one weight, the smallest lose bits. `rows` rounds once, to bfloat16.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: BlockWeight | StoredRows,
        tiles_from: int = TILES_FROM,
        memory: WeightMemory | None = None,
    ) -> None:
        """Pack a weight.

        Args:
            tiles_from: number of tokens, at least 1, from which AMX tiles are used if the CPU has them.
            memory: gives the memory for it; None: of its own.
        """
        assert tiles_from > 0, tiles_from
        self.tiles_from = tiles_from
        made = pack(library, weight, memory)
        self._bits, self._zero, self._has_minima = made.bits, made.zero, made.has_minima
        self._scale_len, self._factor = made.scale_len, made.factor
        self._is_super = made.is_super
        self.kind = self.SUPERBLOCKS if made.is_super else self.BLOCKS
        self._table = made.table
        self._table_address = None if self._table is None else self._table.data_ptr()
        super().__init__(library, *made.shape, made.packed)

    def _multiply(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        num_tokens = x.shape[0]
        workspace = torch.empty(
            self._library.blocks_workspace_bytes(num_tokens, self._inputs, self.tiles_from),
            dtype=torch.uint8,
        )
        self._library.blocks(
            x.data_ptr(),
            x.stride(0),
            self._address,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            workspace.data_ptr(),
            num_tokens,
            self._inputs,
            self._outputs,
            self._bits,
            self._has_minima,
            self._zero,
            self._factor,
            self._form_of(out),
            self._scale_len,
            self.tiles_from,
            self._table_address,
            self._is_super,
            out.stride(0),
        )

    def as_expert(self) -> tuple[int, int, int, int, int, int, float, int]:
        scales = self._has_minima, self._scale_len
        return (
            self._address,
            self.kind,
            self._bits,
            self._zero,
            *scales,
            self._factor,
            self._table_address or 0,
        )

    def _pair(self) -> None:
        self._library.pair_blocks(
            self._address,
            self._outputs,
            self._inputs,
            self._bits,
            self._has_minima,
            self._scale_len,
            self._is_super,
        )

    def _take_rows(self, ids: Tensor, out: Tensor) -> None:
        arguments = self._address, ids.data_ptr(), out.data_ptr(), len(ids), self._inputs, self._bits
        if self._is_super:
            self._library.superblocks_rows(*arguments)
            return
        form = self._has_minima, self._zero, self._factor, self._table_address, self._scale_len
        self._library.blocks_rows(*arguments, *form)

    def multiply_into(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """The matmul into columns of a larger tensor: [T, N] bfloat16 or float32, the values of a row contiguous."""
        assert not self.fuses_silu_and_mul and out.shape == (len(x), self._outputs), out.shape
        self._multiply(x, bias, out)


class BlocksSideBySide:
    """Several weights with the same inputs, in different layouts: a `LinearWeight` with the outputs of all.

    For example q and k in Q4_K, and v in Q6_K: each stays in the bytes of the file.
    """

    def __init__(self, weights: Sequence[NativeBlockLinear]) -> None:
        self.weights = list(weights)
        self._widths = [weight.shape[0] for weight in weights]
        assert len({weight.shape[1] for weight in weights}) == 1, "inputs differ"

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._multiplied(x, bias, torch.bfloat16)

    def to_float32(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._multiplied(x, bias, torch.float32)

    def _multiplied(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        inputs = self.weights[0].shape[1]
        assert x.dtype == torch.bfloat16 and x.shape[1] == inputs, (x.dtype, x.shape)
        if x.stride(1) != 1:
            x = x.contiguous()
        out = x.new_empty((len(x), sum(self._widths)), dtype=dtype)
        biases = [None] * len(self.weights) if bias is None else bias.contiguous().split(self._widths)
        for weight, part, columns in zip(self.weights, biases, out.split(self._widths, dim=1), strict=True):
            assert part is None or part.dtype == torch.bfloat16, part.dtype
            weight.multiply_into(x, part, columns)
        return out
