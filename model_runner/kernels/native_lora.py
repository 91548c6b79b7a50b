"""Adapters by the C++ kernels for the CPU (`kernels/cpu/lora.cpp`): see `LowRankDelta`.

All slots of a layer are one tensor; memory of slots that no adapter has used is not resident.
"""

# Shapes: T tokens, K inputs, N outputs, S slots, R the largest rank.

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F

from ..ops.deltas import MakeDeltas, PackedDelta
from .plain_lora import PlainDelta, PlainEmbeddingDelta, filled_up

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Sequence

    from torch import Tensor

    from ..adapter_runs import AdapterRuns
    from ..ops.deltas import DeltaShape, LowRankDelta

_LANES: Final = 16
_DTYPES: Final = (torch.bfloat16, torch.float32)


class NativeDelta:
    """A linear layer; K must be even in bfloat16. It is a `GatedDelta`."""

    def __init__(self, library: ctypes.CDLL, shape: DeltaShape) -> None:
        """All slots are empty."""
        self._library, self._shape = library, shape
        self._inputs, self._dtype, outputs = shape.inputs, shape.dtype, shape.outputs
        self._outputs = torch.tensor(outputs, dtype=torch.int64)
        self._width = sum(outputs)
        self._columns = _columns(shape.dtype)
        rank = -(-shape.max_rank // self._columns) * self._columns
        self._low_stride = -(-len(outputs) * rank // _LANES) * _LANES
        self._ranks = torch.zeros(shape.num_slots, dtype=torch.int64)
        self._a = _resident((shape.num_slots, self._low_stride * shape.inputs), shape.dtype)
        self._b = _resident((shape.num_slots, sum(map(_padded, outputs)) * rank), shape.dtype)

    def pack(self, parts: Sequence[tuple[Tensor, Tensor] | None]) -> PackedDelta:
        rank, filled = filled_up(parts, self._shape, self._columns)
        a = torch.cat([a for a, _ in filled])
        b = [_panels(b, self._columns).to(self._dtype).view(-1) for _, b in filled]
        return PackedDelta(rank, _panels(a, self._columns).to(self._dtype).view(-1), torch.cat(b))

    def put(self, slot: int, packed: PackedDelta | None) -> None:
        self._ranks[slot] = 0 if packed is None else packed.rank
        if packed is not None:
            self._a[slot, : len(packed.a)] = packed.a
            self._b[slot, : len(packed.b)] = packed.b

    def add(self, x: Tensor, y: Tensor, runs: AdapterRuns) -> Tensor:
        num_tokens = self._check(x, runs)
        assert y.shape == (num_tokens, self._width) and y.is_contiguous(), (y.shape, y.stride())
        assert y.dtype in (x.dtype, torch.float32), y.dtype
        x, low = self._inputs_of(x)
        self._library.lora_add(
            x.data_ptr(),
            x.stride(0),
            y.data_ptr(),
            low.data_ptr(),
            runs.plan.data_ptr(),
            *self._matrices(),
            self._outputs.data_ptr(),
            len(self._outputs),
            self._inputs,
            self._low_stride,
            x.dtype == torch.bfloat16,
            y.dtype == torch.bfloat16,
        )
        return y

    def add_gated(self, x: Tensor, paired: Tensor, runs: AdapterRuns) -> Tensor:
        num_tokens = self._check(x, runs)
        gates, ups = self._outputs.tolist()
        assert gates == ups and gates % _LANES == 0 and x.dtype == torch.bfloat16, (gates, ups, x.dtype)
        assert paired.shape == (num_tokens, self._width) and paired.is_contiguous(), paired.shape
        assert paired.dtype == torch.bfloat16, paired.dtype
        x, low = self._inputs_of(x)
        out = paired.new_empty((num_tokens, gates))
        self._library.lora_gated(
            x.data_ptr(),
            x.stride(0),
            paired.data_ptr(),
            out.data_ptr(),
            low.data_ptr(),
            runs.plan.data_ptr(),
            *self._matrices(),
            self._outputs.data_ptr(),
            self._inputs,
            self._low_stride,
        )
        return out

    def _check(self, x: Tensor, runs: AdapterRuns) -> int:
        """Check what the kernel does not; returns T. Runs end at T by construction."""
        assert x.dtype == self._dtype and x.dim() == 2 and x.shape[1] == self._inputs, (x.dtype, x.shape)
        assert runs.plan.dtype == torch.int64 and runs.plan.is_contiguous()
        assert not runs.runs or runs.runs[-1].last == len(x), (runs.runs[-1], len(x))
        return len(x)

    def _inputs_of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x if x.stride(1) == 1 else x.contiguous()
        return x, x.new_empty((len(x), self._low_stride))

    def _matrices(self) -> tuple[int, int, int, int, int]:
        a, b, columns = self._a, self._b, self._columns
        return (
            a.data_ptr(),
            a.stride(0) // columns,
            b.data_ptr(),
            b.stride(0) // columns,
            self._ranks.data_ptr(),
        )

    @property
    def num_bytes(self) -> int:
        return self._a.nbytes + self._b.nbytes


class NativeEmbeddingDelta:
    """The embedding."""

    def __init__(self, library: ctypes.CDLL, shape: DeltaShape) -> None:
        """All slots are empty."""
        self._library, self._shape = library, shape
        (self._size,) = shape.outputs
        self._columns = _columns(shape.dtype)
        self._max_rank = -(-shape.max_rank // self._columns) * self._columns
        self._outputs = torch.tensor([self._size], dtype=torch.int64)
        self._ranks = torch.zeros(shape.num_slots, dtype=torch.int64)
        self._table = torch.zeros((shape.num_slots, shape.inputs, self._max_rank), dtype=shape.dtype)
        self._b = torch.zeros((shape.num_slots, _padded(self._size) * self._max_rank), dtype=shape.dtype)

    def pack(self, parts: Sequence[tuple[Tensor, Tensor] | None]) -> PackedDelta:
        rank, [(a, b)] = filled_up(parts, self._shape, self._columns)
        dtype = self._shape.dtype
        return PackedDelta(rank, a.T.to(dtype).contiguous(), _panels(b, self._columns).to(dtype).view(-1))

    def put(self, slot: int, packed: PackedDelta | None) -> None:
        self._ranks[slot] = 0 if packed is None else packed.rank
        if packed is not None:
            self._table[slot, :, : packed.rank] = packed.a
            self._b[slot, : len(packed.b)] = packed.b

    def add(self, x: Tensor, y: Tensor, runs: AdapterRuns) -> Tensor:
        assert x.dtype == torch.int64 and x.is_contiguous(), x.dtype
        assert y.shape == (len(x), self._size) and y.is_contiguous() and y.dtype == self._b.dtype, y.shape
        assert not runs.runs or runs.runs[-1].last == len(y), (runs.runs[-1], len(y))
        self._library.lora_embed(
            self._table.data_ptr(),
            x.data_ptr(),
            y.data_ptr(),
            runs.plan.data_ptr(),
            self._b.data_ptr(),
            self._b.stride(0) // self._columns,
            self._ranks.data_ptr(),
            self._outputs.data_ptr(),
            self._shape.inputs,
            self._max_rank,
            y.dtype == torch.bfloat16,
        )
        return y

    @property
    def num_bytes(self) -> int:
        return self._table.nbytes + self._b.nbytes


def native_deltas(library: ctypes.CDLL) -> MakeDeltas:
    """`MakeDeltas` by the C++ kernels; layers that they do not take are in plain torch."""

    def linear(shape: DeltaShape) -> LowRankDelta:
        is_taken = shape.dtype in _DTYPES and not shape.inputs % _columns(shape.dtype)
        return NativeDelta(library, shape) if is_taken else PlainDelta(shape)

    def embedding(shape: DeltaShape) -> LowRankDelta:
        is_taken = shape.dtype in _DTYPES
        return NativeEmbeddingDelta(library, shape) if is_taken else PlainEmbeddingDelta(shape)

    return MakeDeltas(linear, embedding)


def _columns(dtype: torch.dtype) -> int:
    """Columns of a matrix that are stored together."""
    return 2 if dtype == torch.bfloat16 else 1


def _padded(rows: int) -> int:
    return -(-rows // _LANES) * _LANES


def _panels(matrix: Tensor, columns: int) -> Tensor:
    """[rows, K] as panels, [rows / 16, K / columns, 16, columns]; rows and columns are filled up with zeros."""
    rows, inputs = matrix.shape
    matrix = F.pad(matrix, (0, -inputs % columns, 0, -rows % _LANES))
    return matrix.view(-1, _LANES, matrix.shape[1] // columns, columns).transpose(1, 2).contiguous()


def _resident(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that are written now: memory in use when loading ends is moved into huge pages (`memory/huge_pages.py`)."""
    return torch.empty(shape, dtype=dtype).zero_()
