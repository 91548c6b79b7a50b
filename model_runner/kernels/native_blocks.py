"""`NativeBlockLinear`: products with block-quantised weights by our C++ kernels (`kernels/cpu/blocks.cpp`).

Activations are quantised, too, each token's block of 32 to whole numbers in -127..127 with one scale. Sums are exact
within a block and float32 beyond, in one order: a token's bits do not depend on the other tokens of its batch.
"""

# Shapes: T tokens, K inputs, N outputs.

from __future__ import annotations

import ctypes
import math
from typing import Final

import torch
from torch import Tensor

from .cpu.library import load_library, reasons_against_library
from .quantised_weights import BLOCK_SIZE, BlockWeight

_HALF_EXPONENT: Final = 15
"""Scales and minima are kept in half precision, times a power of two that makes the largest just smaller than 2^15."""


def reasons_against_native_blocks(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> list[str]:
    """Why our product cannot take a weight of this shape, (N, K), or should not."""
    if device.type != "cpu":
        return [f"runs on CPUs only, not on {device.type}"]
    reasons = []
    if dtype != torch.bfloat16:
        reasons.append(f"computes in bfloat16 only, not in {dtype}")
    if shape[1] % BLOCK_SIZE:
        reasons.append(f"needs inputs in blocks of {BLOCK_SIZE}, not {shape[1]} of them")
    if not (against_library := reasons_against_library()) and not load_library().blocks_are_fast():
        reasons.append("this CPU lacks AVX512-VNNI (or AVX512-BF16)")
    return reasons + against_library


class NativeBlockLinear:
    """A `BlockWeight` [N, K] packed for our product, which needs no other copy of it for any number of tokens.

    Scales and minima are rounded to half precision, which most formats have them in; where they differ by more than
    2^29 within a weight, the smallest lose bits.
    """

    def __init__(self, library: ctypes.CDLL, weight: BlockWeight) -> None:
        self._library = library
        self._outputs, self._inputs = weight.shape
        self._bits, self._zero = weight.bits, weight.zero if weight.minima is None else 0
        self._has_minima = weight.minima is not None
        _check(weight)
        exponent = _HALF_EXPONENT - _exponent(weight)
        self._factor = 2.0**-exponent
        numbers = weight.numbers.contiguous()
        scales = _halves(weight.scales, exponent)
        minima = None if weight.minima is None else _halves(weight.minima, exponent)
        self._packed = torch.empty(
            library.packed_blocks_bytes(self._outputs, self._inputs, self._bits, self._has_minima),
            dtype=torch.uint8,
        )
        self._address = self._packed.data_ptr()
        library.pack_blocks(
            numbers.data_ptr(),
            scales.data_ptr(),
            None if minima is None else minima.data_ptr(),
            self._outputs,
            self._inputs,
            self._bits,
            self._address,
        )

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `LinearWeight`."""
        return self._multiply(x, bias, torch.bfloat16)

    def to_float32(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The same product before it is rounded: [T, N] float32, as whoever samples wants his logits."""
        return self._multiply(x, bias, torch.float32)

    def rows(self, ids: Tensor) -> Tensor:
        """weight[ids], rounded to bfloat16 once: an embedding that shares its weight needs no table of its own.

        Args:
            ids: [T] int64, 0 <= id < N: not checked, as memory beside the weight would be read.

        Returns:
            [T, K] bfloat16.
        """
        assert ids.dtype == torch.int64 and ids.dim() == 1, (ids.dtype, ids.shape)
        ids = ids.contiguous()
        out = torch.empty((len(ids), self._inputs), dtype=torch.bfloat16)
        self._library.blocks_rows(
            self._address,
            ids.data_ptr(),
            out.data_ptr(),
            len(ids),
            self._inputs,
            self._bits,
            self._has_minima,
            self._zero,
            self._factor,
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
        workspace = torch.empty(
            self._library.blocks_workspace_bytes(num_tokens, self._inputs), dtype=torch.uint8
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
            dtype == torch.float32,
        )
        return out


def _check(weight: BlockWeight) -> None:
    """What the kernel takes for granted."""
    num_outputs, num_inputs = weight.shape
    assert weight.bits in (4, 8) and num_inputs % BLOCK_SIZE == 0, (weight.bits, num_inputs)
    assert weight.numbers.dtype == torch.uint8 and weight.numbers.device.type == "cpu", weight.numbers.dtype
    assert 0 <= weight.zero <= 255, weight.zero
    for part in (weight.scales, weight.minima):
        if part is not None:
            assert part.dtype == torch.float32, part.dtype
            assert part.shape == (num_outputs, num_inputs // BLOCK_SIZE), part.shape


def _halves(part: Tensor, exponent: int) -> Tensor:
    """part * 2^exponent in half precision."""
    return torch.ldexp(part, torch.tensor(exponent)).to(torch.float16).contiguous()


def _exponent(weight: BlockWeight) -> int:
    """e so that all scales and minima are smaller than 2^e."""
    largest = max(
        float(part.abs().max())
        for part in (weight.scales, weight.minima)
        if part is not None and part.numel()
    )
    assert math.isfinite(largest), "scales must be finite"
    return math.frexp(largest)[1] if largest else 0
