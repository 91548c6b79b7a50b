"""Adapters in plain torch, on any device: see `LowRankDelta`. Runs are read on the host: steps are not recordable."""

# Shapes: T tokens, K inputs, N outputs, S slots, R the largest rank.

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ..ops.deltas import PackedDelta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ..adapter_runs import AdapterRuns
    from ..ops.deltas import EmbeddingDelta, LowRankDelta


class PlainDelta:
    """A [S, parts, R, K] and B [S, N, R] as they are."""

    def __init__(
        self,
        inputs: int,
        outputs: Sequence[int],
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """All slots are empty."""
        self._outputs = list(outputs)
        self._inputs = inputs
        self._ranks = [0] * num_slots
        self._a = torch.zeros((num_slots, len(outputs), max_rank, inputs), dtype=dtype, device=device)
        self._b = torch.zeros((num_slots, sum(outputs), max_rank), dtype=dtype, device=device)

    def pack(self, parts: Sequence[tuple[Tensor, Tensor] | None]) -> PackedDelta:
        rank, filled = filled_up(parts, self._outputs, self._inputs)
        a = torch.stack([a for a, _ in filled]).to(self._a.dtype)
        return PackedDelta(rank, a, torch.cat([b for _, b in filled]).to(self._b.dtype))

    def put(self, slot: int, packed: PackedDelta | None) -> None:
        self._ranks[slot] = 0 if packed is None else packed.rank
        if packed is not None:
            self._a[slot, :, : packed.rank] = packed.a.to(self._a.device)
            self._b[slot, :, : packed.rank] = packed.b.to(self._b.device)

    def add(self, x: Tensor, y: Tensor, runs: AdapterRuns) -> Tensor:
        _refuse_recording(y, runs)
        for slot, first, last in runs.on_host():
            if rank := self._ranks[slot]:
                mine = x[first:last].float()
                for a, b, out in zip(
                    self._a[slot, :, :rank],
                    self._b[slot, :, :rank].split(self._outputs),
                    y[first:last].split(self._outputs, dim=1),
                    strict=True,
                ):
                    low = (mine @ a.float().T).to(x.dtype).float()
                    out.copy_(out.float() + low @ b.float().T)
        return y

    @property
    def num_bytes(self) -> int:
        return self._a.nbytes + self._b.nbytes


class PlainEmbeddingDelta:
    """A [S, tokens, R], transposed, and B [S, K, R]."""

    def __init__(
        self,
        vocab_size: int,
        size: int,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """All slots are empty."""
        self._ranks = [0] * num_slots
        self._a = torch.zeros((num_slots, vocab_size, max_rank), dtype=dtype, device=device)
        self._b = torch.zeros((num_slots, size, max_rank), dtype=dtype, device=device)

    def pack(self, parts: Sequence[tuple[Tensor, Tensor] | None]) -> PackedDelta:
        (part,) = parts
        assert part is not None
        a, b = part
        return PackedDelta(len(a), a.T.contiguous().to(self._a.dtype), b.to(self._b.dtype))

    def put(self, slot: int, packed: PackedDelta | None) -> None:
        self._ranks[slot] = 0 if packed is None else packed.rank
        if packed is not None:
            self._a[slot, :, : packed.rank] = packed.a.to(self._a.device)
            self._b[slot, :, : packed.rank] = packed.b.to(self._b.device)

    def add(self, token_ids: Tensor, y: Tensor, runs: AdapterRuns) -> Tensor:
        _refuse_recording(y, runs)
        for slot, first, last in runs.on_host():
            if rank := self._ranks[slot]:
                low = self._a[slot, token_ids[first:last], :rank].float()
                mine = y[first:last]
                mine.copy_(mine.float() + low @ self._b[slot, :, :rank].float().T)
        return y

    @property
    def num_bytes(self) -> int:
        return self._a.nbytes + self._b.nbytes


def _refuse_recording(y: Tensor, runs: AdapterRuns) -> None:
    """Runs that are known only to a replay: an operation that no recording takes, also if it were without runs."""
    if not runs.runs:
        y.mul_(1)


class PlainDeltas:
    """`MakeDeltas` in plain torch."""

    def linear(
        self,
        inputs: int,
        outputs: Sequence[int],
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LowRankDelta:
        return PlainDelta(inputs, outputs, num_slots, max_rank, dtype, device)

    def embedding(
        self,
        vocab_size: int,
        size: int,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> EmbeddingDelta:
        return PlainEmbeddingDelta(vocab_size, size, num_slots, max_rank, dtype, device)


def filled_up(
    parts: Sequence[tuple[Tensor, Tensor] | None], outputs: Sequence[int], inputs: int, multiple: int = 1
) -> tuple[int, list[tuple[Tensor, Tensor]]]:
    """The largest rank, rounded up, and A and B of each module, filled up to it with zeros."""
    rank = max(len(part[0]) for part in parts if part is not None)
    rank = -(-rank // multiple) * multiple
    filled = []
    for part, num_outputs in zip(parts, outputs, strict=True):
        if part is None:
            filled.append((torch.zeros((rank, inputs)), torch.zeros((num_outputs, rank))))
            continue
        a, b = part
        missing = rank - len(a)
        filled.append((F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))))
    return rank, filled
