"""Changes that LoRA adapters make to a linear layer or to the embedding."""

# Shapes: T tokens, K inputs, N outputs.

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

if TYPE_CHECKING:
    import torch

    from ..adapter_runs import AdapterRuns


class PackedDelta(NamedTuple):
    """One layer's part of an adapter in the layout of its kernel; `rank` is the largest of its modules'."""

    rank: int
    a: Tensor
    b: Tensor


class LowRankDelta(Protocol):
    """The changes of a linear layer by adapters: B (A x) for some rows of x, with the matrices of the row's slot.

    The layer may be several modules, stacked by their outputs; each has its own A and B.
    """

    def pack(self, parts: Sequence[tuple[Tensor, Tensor] | None]) -> PackedDelta:
        """An adapter's A [rank, K] and B [outputs, rank] of each module, float32; None: it does not change the module.

        May be called on any thread. Smaller ranks are filled up with zeros.
        """
        ...

    def put(self, slot: int, packed: PackedDelta | None) -> None:
        """Copy an adapter into a slot; None: it does not change this layer."""
        ...

    def add(self, x: Tensor, y: Tensor, runs: AdapterRuns) -> Tensor:
        """y + B (A x), rounded once: x [T, K] in the serving dtype, y [T, N] in it or in float32, contiguous.

        A x is accumulated in float32 and rounded to the serving dtype. `y` may be overwritten; use the returned tensor.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """Memory of all slots."""
        ...


@runtime_checkable
class GatedDelta(LowRankDelta, Protocol):
    """A `LowRankDelta` for a weight with a fused activation, see `UngateableWeight`."""

    def add_gated(self, x: Tensor, paired: Tensor, runs: AdapterRuns) -> Tensor:
        """silu(gate) * up of the changed gates and ups: [T, K], [T, N] as by `ungated` -> [T, N / 2]."""
        ...


class EmbeddingDelta(Protocol):
    """The changes of an embedding by adapters: B times the token's column of A."""

    def pack(self, parts: Sequence[tuple[Tensor, Tensor] | None]) -> PackedDelta:
        """One part, A [rank, tokens] and B [K, rank]."""
        ...

    def put(self, slot: int, packed: PackedDelta | None) -> None: ...

    def add(self, token_ids: Tensor, y: Tensor, runs: AdapterRuns) -> Tensor:
        """[T] int64, y [T, K], contiguous -> [T, K]; `y` may be overwritten."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory of all slots."""
        ...


class MakeDeltas(Protocol):
    """Makes the memory of adapters, all slots empty; used only by servers with adapters."""

    def linear(
        self,
        inputs: int,
        outputs: Sequence[int],
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LowRankDelta:
        """For a linear layer whose modules have so many `outputs` each."""
        ...

    def embedding(
        self,
        vocab_size: int,
        size: int,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> EmbeddingDelta:
        """For the embedding."""
        ...
