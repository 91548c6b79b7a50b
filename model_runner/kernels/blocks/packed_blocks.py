"""`PackedBlocks`: a block-quantized weight in a layout of the C++ kernels; `pack` makes it.

The layouts are those of `kernels/cpu/blocks.h` and, for K-quants of whole superblocks, `kernels/cpu/super_blocks.h`.

The rows of a GGUF file are packed in one pass (`kernels/cpu/pack_rows.cpp`). Rows of types that this does not know (the
rare ones with grids, with digits in base 3, and NVFP4) are unpacked into a `BlockWeight` first.
"""

# Shapes: K inputs, N outputs.

from __future__ import annotations

import ctypes
import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ....models.spec.quantization import BlockForm
from ...memory.huge_pages import WeightMemory
from ..quantized_weights import BLOCK_SIZE, FP8, FP8_MAX, HALF_BLOCK, BlockWeight, NotFiniteError
from .stored_rows import StoredRows
from .tensor_rows import ROUNDED_AT_A_TIME, ScaleRange, TensorRows

_HALF_EXPONENT: Final = 15
"""Scales and minima are stored in half precision, times a power of two that makes the largest just below 2^15."""
SUPERBLOCK_BITS: Final = {"Q4_K": 4, "Q5_K": 5, "Q6_K": 6}
_E4M3_FACTOR: Final = 256.0
"""See `kernels/cpu/bytes.h`."""
_NAN: Final = 0x7F
_PANEL: Final = 32
"""Outputs per panel of the layout; the last panel is padded with zeros."""


class PackedBlocks(NamedTuple):
    """A packed weight [N, K].

    Attributes:
        packed: its bytes.
        factor: the scales and minima are to be multiplied by it.
        scale_len: inputs that share a scale: 32; 64, if blocks 2k and 2k + 1 of each output have the same, with 8 bits
            and without minima; 64 or 128, if 2 or 4 neighboring blocks of 4 bits have the same scales and minima; 16,
            with scales of 8 bits and a table.
        is_super: the layout is that of `kernels/cpu/super_blocks.h`, with 4, 5 or 6 bits.
    """

    packed: Tensor
    shape: tuple[int, int]
    bits: int
    zero: int
    has_minima: bool
    scale_len: int
    table: Tensor | None
    factor: float
    is_super: bool = False


def pack(
    library: ctypes.CDLL, weight: BlockWeight | StoredRows, memory: WeightMemory | None = None
) -> PackedBlocks:
    """Pack a weight, into memory of its own if `memory` is None.

    Raises:
        NotFiniteError: a scale or a minimum is not finite.
    """
    memory = memory or WeightMemory()
    if isinstance(weight, BlockWeight):
        return _pack_unpacked(library, weight, memory)
    if weight.is_in_superblocks:
        return _pack_superblocks(library, weight, memory)
    if all(library.packs_rows(one.type_number) for one in weight.tensors):
        return _pack_stored(library, weight, memory)
    return _pack_unpacked(library, weight.unpacked(), memory)


def _pack_stored(library: ctypes.CDLL, weight: StoredRows, memory: WeightMemory) -> PackedBlocks:
    form, shape = weight.form, weight.shape
    packed = memory.take(library.packed_blocks_bytes(*shape, form.bits, form.has_minima, BLOCK_SIZE))
    num_stored = shape[0] - weight.padding
    if num_stored % _PANEL or weight.padding:
        packed.view(-(-shape[0] // _PANEL), -1)[num_stored // _PANEL :].zero_()
    exponent = _HALF_EXPONENT - _exponent_of([_widened_range(one, form) for one in weight.tensors])
    first, is_paired = 0, form.bits == 8 and not form.has_minima
    for one in weight.tensors:
        table = None if one.form.table is None or form.table is not None else _table(one.form.table)
        factors = None if one.form.is_exact else one.factors
        for start, piece in one.pieces():
            is_paired &= bool(
                library.pack_rows(
                    *piece.arguments,
                    packed.data_ptr(),
                    first + start,
                    form.bits,
                    form.has_minima,
                    exponent,
                    one.form.zero,
                    None if table is None else table.data_ptr(),
                    None if factors is None else factors[start // ROUNDED_AT_A_TIME :].data_ptr(),
                    ROUNDED_AT_A_TIME,
                )
            )
        first += one.shape[0]
    table = None if form.table is None else _table(form.table)
    zero = 0 if form.has_minima else form.zero
    scale_len = 2 * BLOCK_SIZE if is_paired else BLOCK_SIZE
    return PackedBlocks(packed, shape, form.bits, zero, form.has_minima, scale_len, table, 2.0**-exponent)


def _pack_superblocks(library: ctypes.CDLL, weight: StoredRows, memory: WeightMemory) -> PackedBlocks:
    bits = SUPERBLOCK_BITS[weight.tensors[0].ggml_type.name]
    packed = memory.take(library.packed_superblocks_bytes(*weight.shape, bits))
    num_stored = weight.shape[0] - weight.padding
    if num_stored % _PANEL or weight.padding:
        packed.view(-(-weight.shape[0] // _PANEL), -1)[num_stored // _PANEL :].zero_()
    first, is_finite = 0, True
    for one in weight.tensors:
        superblocks = None if one.blocks is None else one.superblocks
        for start, piece in one.pieces():
            raw, row_bytes, _, rows, num_rows, _, _ = piece.arguments
            is_finite &= bool(
                library.pack_superblocks(
                    raw,
                    row_bytes,
                    rows,
                    None if superblocks is None else superblocks.data_ptr(),
                    first + start,
                    num_rows,
                    weight.shape[1],
                    bits,
                    packed.data_ptr(),
                )
            )
        first += one.shape[0]
    if not is_finite:
        raise NotFiniteError
    has_minima = weight.form.has_minima
    return PackedBlocks(packed, weight.shape, bits, 0, has_minima, BLOCK_SIZE, None, 1.0, is_super=True)


def _widened_range(rows: TensorRows, form: BlockForm) -> ScaleRange:
    """The range of scales, and of minima where the rows get them only in the form of the whole weight."""
    found = rows.scale_range
    if rows.form.has_minima or not form.has_minima:
        return found
    return found._replace(minimum=float(torch.tensor(found.scale) * rows.form.zero))


def _pack_unpacked(library: ctypes.CDLL, weight: BlockWeight, memory: WeightMemory) -> PackedBlocks:
    _check(weight)
    has_minima = weight.minima is not None
    outputs, inputs = weight.shape
    scale_len = weight.scale_len
    packed = memory.take(library.packed_blocks_bytes(outputs, inputs, weight.bits, has_minima, scale_len))
    largest = (
        float(part.abs().max()) if part is not None and part.numel() else 0.0
        for part in (weight.scales, weight.minima)
    )
    exponent = _HALF_EXPONENT - _exponent_of([ScaleRange(*largest)])
    numbers = weight.numbers.contiguous()
    if weight.factor is None:
        step = scale_len // BLOCK_SIZE if weight.bits == 4 else 1
        scales, factor = _halves(weight.scales[:, ::step], exponent), 2.0**-exponent
        minima = None if weight.minima is None else _halves(weight.minima[:, ::step], exponent)
    else:
        scales, factor, minima = _bytes(weight.scales), weight.factor * _E4M3_FACTOR, None
    library.pack_blocks(
        numbers.data_ptr(),
        scales.data_ptr(),
        None if minima is None else minima.data_ptr(),
        outputs,
        inputs,
        weight.bits,
        scale_len,
        packed.data_ptr(),
    )
    return PackedBlocks(
        packed,
        weight.shape,
        weight.bits,
        0 if has_minima else weight.zero,
        has_minima,
        scale_len,
        None if weight.table is None else _table(weight.table),
        factor,
    )


def _table(values: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def _check(weight: BlockWeight) -> None:
    """Check the ranges and shapes that the kernel relies on."""
    num_outputs, num_inputs = weight.shape
    assert weight.bits in (4, 8) and num_inputs % BLOCK_SIZE == 0, (weight.bits, num_inputs)
    assert weight.numbers.dtype == torch.uint8 and weight.numbers.device.type == "cpu", weight.numbers.dtype
    assert 0 <= weight.zero <= 255, weight.zero
    if weight.table is not None:
        assert weight.bits == 4 and weight.minima is None and len(weight.table) == 16, weight.table
        assert all(0 <= value <= 255 and abs(value - weight.zero) <= 127 for value in weight.table), (
            weight.table
        )
    assert weight.factor is None or weight.table is not None, weight.factor
    scale_len = BLOCK_SIZE if weight.factor is None else HALF_BLOCK
    for part in (weight.scales, weight.minima):
        if part is not None:
            assert part.dtype == torch.float32, part.dtype
            assert part.shape == (num_outputs, num_inputs // scale_len), part.shape


def _halves(part: Tensor, exponent: int) -> Tensor:
    """part * 2^exponent in half precision."""
    return torch.ldexp(part, torch.tensor(exponent)).to(torch.float16).contiguous()


def _bytes(scales: Tensor) -> Tensor:
    """Values of e4m3 as bytes. Scales of GGUF files may also be 480, which has the code of NaN in e4m3."""
    codes = scales.to(FP8).view(torch.uint8)
    return codes.masked_fill_(scales > FP8_MAX, _NAN).contiguous()


def _exponent_of(ranges: list[ScaleRange]) -> int:
    """e such that all scales and minima are smaller than 2^e."""
    if not all(one.is_finite for one in ranges):
        raise NotFiniteError
    largest = max(max(one) for one in ranges)
    return math.frexp(largest)[1] if largest else 0
