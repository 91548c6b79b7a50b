"""`TensorRows`: outputs of one tensor of a GGUF file, as rows of the file; see `stored_rows`."""

# Shapes: K inputs, N outputs.

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....models.gguf.ggml_blocks import unpack_blocks
from ....models.gguf.ggml_types import GGML_TYPES, dequantize
from ....models.spec.quantization import GGUF_FORMS, SUPERBLOCK_LEN, BlockForm
from ..cpu.library import load_library, reasons_against_library
from ..quantized_weights import BLOCK_SIZE, BlockWeight, stack_blocks
from .block_rounding import factor_for, int8_scales, round_to_blocks

if TYPE_CHECKING:
    from ....models.gguf.ggml_codes import Bytes
    from ....models.gguf.ggml_types import GGMLType

ROUNDED_AT_A_TIME: Final = 4096
"""Rows rounded to 8 bits at a time: bounds their float32 copy. They share a factor (`round_to_blocks`)."""


_PIECE_BYTES: Final = 32 << 20
"""Bytes of the file that are mapped at a time for a large tensor."""

_NUMBERS: Final = {one.name: number for number, one in GGML_TYPES.items()}


class ScaleRange(NamedTuple):
    """The largest magnitudes of scales and minima; infinite or NaN if one of them is."""

    scale: float
    minimum: float

    @property
    def is_finite(self) -> bool:
        """Whether all scales and minima are finite."""
        return math.isfinite(self.scale) and math.isfinite(self.minimum)


def _nothing() -> None:
    pass


@dataclass(frozen=True, eq=False)
class TensorRows:
    """Outputs of one tensor.

    Attributes:
        raw: [M, row_bytes] uint8, read-only; the bytes of a row are contiguous. Usually a view of the mapped file.
        ggml_type: a type of `GGUF_FORMS`.
        rows: [N] int64, the row of each output; None: output n is row n.
        blocks: [K / 32] int64, the block of a row for each 32 inputs; None: all blocks in order.
        release: ends the use of `raw`: the memory of the mapped pages is given back. They can be read again.
    """

    raw: Bytes
    ggml_type: GGMLType
    rows: Tensor | None = None
    blocks: Tensor | None = None
    release: Callable[[], None] = _nothing

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        num_blocks = self.blocks_per_row if self.blocks is None else len(self.blocks)
        return len(self.raw) if self.rows is None else len(self.rows), num_blocks * BLOCK_SIZE

    @property
    def blocks_per_row(self) -> int:
        """Blocks of 32 in a row of `raw`."""
        row_bytes: int = self.raw.shape[1]
        return row_bytes // self.ggml_type.block_bytes * self.ggml_type.block_len // BLOCK_SIZE

    @property
    def form(self) -> BlockForm:
        """The form of these rows alone."""
        return GGUF_FORMS[self.ggml_type.name]

    @cached_property
    def superblocks(self) -> Tensor | None:
        """[K / 256] int64: the superblock of a row for each 256 inputs.

        None: there is no layout of superblocks for this type, or inputs are parts of one.
        """
        if not self.form.superblock_bytes or self.shape[1] % SUPERBLOCK_LEN:
            return None
        if self.blocks is None:
            return torch.arange(self.shape[1] // SUPERBLOCK_LEN)
        blocks = self.blocks.view(-1, SUPERBLOCK_LEN // BLOCK_SIZE)
        first = blocks[:, :1]
        is_whole = (
            torch.equal(blocks, first + torch.arange(blocks.shape[1])) and not (first % blocks.shape[1]).any()
        )
        return (first // blocks.shape[1]).flatten().contiguous() if is_whole else None

    @property
    def type_number(self) -> int:
        """The type's number in a file."""
        return _NUMBERS[self.ggml_type.name]

    @property
    def arguments(self) -> tuple[int | None, ...]:
        """The first arguments of the library's functions for rows; valid while this object is."""
        assert self.raw.dtype == np.uint8 and self.raw.strides[1] == 1, self.raw.strides
        for order in (self.rows, self.blocks):
            assert order is None or (order.dtype == torch.int64 and order.is_contiguous()), order
        num_rows, num_inputs = self.shape
        return (
            self.raw.ctypes.data,
            self.raw.strides[0],
            self.type_number,
            None if self.rows is None else self.rows.data_ptr(),
            num_rows,
            None if self.blocks is None else self.blocks.data_ptr(),
            num_inputs // BLOCK_SIZE,
        )

    @property
    def is_finite(self) -> bool:
        """Whether all scales and minima are finite; integers always are."""
        if self.superblocks is None:
            return self.scale_range.is_finite
        size = self.ggml_type.block_bytes
        factors = slice(size - 2, size) if self.ggml_type.name == "Q6_K" else slice(4)
        for _, piece in self.pieces():
            found = piece.raw.reshape(len(piece.raw), -1, size)[:, :, factors]
            found = found if piece.rows is None else found[piece.rows.numpy()]
            if not np.isfinite(np.ascontiguousarray(found).view(np.float16)).all():
                return False
        return True

    @cached_property
    def scale_range(self) -> ScaleRange:
        """Computed once: it is needed for the check of values and for packing."""
        if reasons_against_library() or not load_library().packs_rows(self.type_number):
            weight = self._unpacked  # kept for packing, which takes it
            return ScaleRange(*(_largest(part) for part in (weight.scales, weight.minima)))
        scales, minima = self._scanned
        if not self.form.is_exact:  # values, not scales
            scales = int8_scales(scales * self.factors).div_(self.factors)
        return ScaleRange(_largest(scales), _largest(minima))

    @cached_property
    def factors(self) -> Tensor:
        """Factors of `round_to_blocks` for a type that is rounded, [N / 4096] float32."""
        whole = self if self.blocks is None else replace(self, blocks=None)  # inputs are taken after rounding
        return torch.tensor([factor_for(largest) for largest in whole._scanned[0].tolist()])

    @cached_property
    def _scanned(self) -> tuple[Tensor, Tensor]:
        return scan(load_library(), self)

    def pieces(self) -> Iterator[tuple[int, TensorRows]]:
        """The outputs in pieces of some megabytes, each with the number of its first output.

        All but the last have a multiple of `ROUNDED_AT_A_TIME` outputs. The pages of a piece are given back when the
        next one is taken.
        """
        num_rows, most = self.shape[0], _PIECE_BYTES // self.raw.strides[0]
        step = max(most // ROUNDED_AT_A_TIME, 1) * ROUNDED_AT_A_TIME
        if num_rows <= step:
            yield 0, self
            return
        for start in range(0, num_rows, step):
            part = slice(start, start + step)
            if self.rows is None:
                yield start, replace(self, raw=self.raw[part])
            else:
                yield start, replace(self, rows=self.rows[part])
            self.release()

    def unpacked(self) -> BlockWeight:
        """The outputs as a `BlockWeight`."""
        return self._unpacked if "_unpacked" in vars(self) else self._unpack()

    @cached_property
    def _unpacked(self) -> BlockWeight:
        return self._unpack()

    def _unpack(self) -> BlockWeight:
        weight = block_weight(self.raw if self.rows is None else self.raw[self.rows.numpy()], self.ggml_type)
        return weight if self.blocks is None else weight.take_blocks(self.blocks)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """[N, K], rounded once; the values of the file for types that have a layout of superblocks."""
        if self.form.is_exact or not self.form.superblock_bytes:
            return self.unpacked().dequantized(dtype)
        out = torch.empty(self.shape, dtype=dtype)
        for start in range(0, len(out), ROUNDED_AT_A_TIME):
            rows = slice(start, start + ROUNDED_AT_A_TIME)
            raw = self.raw[rows] if self.rows is None else self.raw[self.rows[rows].numpy()]
            values = torch.from_numpy(dequantize(raw, self.ggml_type))
            if self.blocks is not None:
                values = values.view(len(values), -1, BLOCK_SIZE)[:, self.blocks].flatten(1)
            out[rows] = values
        return out


def scan(library: ctypes.CDLL, rows: TensorRows) -> tuple[Tensor, Tensor]:
    """See `scan_rows` of pack_rows.cpp: one result per `ROUNDED_AT_A_TIME` rows. For types that `packs_rows`."""
    scales, minima = torch.zeros(2, -(-rows.shape[0] // ROUNDED_AT_A_TIME))
    for start, piece in rows.pieces():
        to = (found[start // ROUNDED_AT_A_TIME :].data_ptr() for found in (scales, minima))
        library.scan_rows(*piece.arguments, ROUNDED_AT_A_TIME, *to)
    return scales, minima


def _largest(part: Tensor | None) -> float:
    return 0.0 if part is None or not part.numel() else float(part.abs().max())


def block_weight(raw: Bytes, ggml_type: GGMLType) -> BlockWeight:
    """Convert rows [N, row_bytes] of a type of `GGUF_FORMS`: the file's integers, or values rounded to 8 bits."""
    form = GGUF_FORMS[ggml_type.name]
    if not form.is_exact:
        pieces = (raw[start : start + ROUNDED_AT_A_TIME] for start in range(0, len(raw), ROUNDED_AT_A_TIME))
        return stack_blocks(
            [round_to_blocks(torch.from_numpy(dequantize(one, ggml_type)), 8) for one in pieces]
        )
    numbers, scales, minima = unpack_blocks(raw, ggml_type)
    factor = None
    if form.scale_len < BLOCK_SIZE:  # scales are half as large as those in the file, which are e4m3
        factor, scales = 0.5, scales * np.float32(2)
    return BlockWeight(
        torch.from_numpy(numbers),
        torch.from_numpy(scales),
        None if minima is None else torch.from_numpy(minima),
        form.zero,
        form.bits,
        form.table,
        factor,
    )
