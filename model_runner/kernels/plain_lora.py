"""Adapters in plain torch, on any device: see `LowRankDelta`. Runs are read on the host: steps are not recordable."""

# Shapes: T tokens, K inputs, N outputs, M modules, S slots, R the largest rank.

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

import torch
import torch.nn.functional as F

from ..ops.deltas import MakeDeltas, PackedDelta

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from ..adapter_runs import AdapterRuns
    from ..ops.deltas import DeltaShape


class SlotMatrices:
    """A [S, M, R, K] and B [S, N, R] of the adapters in all slots, on the device; A of an embedding is [S, K, R].

    Attributes:
        ranks: of each slot, 0 for an empty one; beyond its rank an adapter's matrices are arbitrary.
    """

    is_table: ClassVar[bool] = False

    def __init__(self, shape: DeltaShape) -> None:
        """Make the memory; all slots are empty."""
        rows = (
            (shape.inputs, shape.max_rank)
            if self.is_table
            else (len(shape.outputs), shape.max_rank, shape.inputs)
        )
        self.shape = shape
        self.ranks = [0] * shape.num_slots
        self.a = torch.zeros((shape.num_slots, *rows), dtype=shape.dtype, device=shape.device)
        self.b = torch.zeros(
            (shape.num_slots, sum(shape.outputs), shape.max_rank), dtype=shape.dtype, device=shape.device
        )

    def pack(self, parts: Sequence[tuple[Tensor, Tensor] | None]) -> PackedDelta:
        rank, filled = filled_up(parts, self.shape)
        a = filled[0][0].T.contiguous() if self.is_table else torch.stack([a for a, _ in filled])
        return PackedDelta(
            rank, a.to(self.shape.dtype), torch.cat([b for _, b in filled]).to(self.shape.dtype)
        )

    def put(self, slot: int, packed: PackedDelta | None) -> None:
        self.ranks[slot] = 0 if packed is None else packed.rank
        if packed is not None:
            self.a[slot, :, : packed.rank].copy_(packed.a)
            self.b[slot, :, : packed.rank].copy_(packed.b)

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


class PlainDelta(SlotMatrices):
    """A linear layer."""

    def add(self, x: Tensor, y: Tensor, runs: AdapterRuns) -> Tensor:
        outputs = self.shape.outputs
        for slot, rank, rows in _adapted(self.ranks, y, runs):
            mine = x[rows].float()
            for a, b, out in zip(
                self.a[slot, :, :rank],
                self.b[slot, :, :rank].split(outputs),
                y[rows].split(outputs, dim=1),
                strict=True,
            ):
                low = (mine @ a.float().T).to(x.dtype).float()
                out.copy_(out.float() + low @ b.float().T)
        return y


class PlainEmbeddingDelta(SlotMatrices):
    """The embedding."""

    is_table = True

    def add(self, x: Tensor, y: Tensor, runs: AdapterRuns) -> Tensor:
        for slot, rank, rows in _adapted(self.ranks, y, runs):
            low = self.a[slot, x[rows], :rank].float()
            mine = y[rows]
            mine.copy_(mine.float() + low @ self.b[slot, :, :rank].float().T)
        return y


def _adapted(ranks: Sequence[int], y: Tensor, runs: AdapterRuns) -> Iterator[tuple[int, int, slice]]:
    """Slot, rank and rows of each run that an adapter changes."""
    # Known only to a replay: an operation that no recording takes, also if it were without runs.
    if not runs.runs:
        y.mul_(1)
    for slot, first, last in runs.on_host():
        if rank := ranks[slot]:
            yield slot, rank, slice(first, last)


DELTAS: Final = MakeDeltas(PlainDelta, PlainEmbeddingDelta)


def filled_up(
    parts: Sequence[tuple[Tensor, Tensor] | None], shape: DeltaShape, multiple: int = 1
) -> tuple[int, list[tuple[Tensor, Tensor]]]:
    """The largest rank, rounded up, and A and B of each module, filled up to it with zeros."""
    rank = max(len(part[0]) for part in parts if part is not None)
    rank = -(-rank // multiple) * multiple
    filled = []
    for part, num_outputs in zip(parts, shape.outputs, strict=True):
        if part is None:
            filled.append((torch.zeros((rank, shape.inputs)), torch.zeros((num_outputs, rank))))
            continue
        a, b = part
        missing = rank - len(a)
        filled.append((F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))))
    return rank, filled
