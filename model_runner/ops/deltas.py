"""Changes that LoRA adapters make to a linear layer or to the embedding."""

# Shapes: T tokens, K inputs, N outputs, S slots, R the largest rank.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

if TYPE_CHECKING:
    import torch

    from ..adapter_runs import AdapterRuns


class DeltaShape(NamedTuple):
    """The memory for the adapters of one layer.

    Attributes:
        inputs: K; of the embedding, tokens of the vocabulary.
        outputs: of each module; the modules of a layer are stacked by their outputs, and each has its own A and B.
        num_slots: S, with slot 0, the base model.
        max_rank: R.
    """

    inputs: int
    outputs: tuple[int, ...]
    num_slots: int
    max_rank: int
    dtype: torch.dtype
    device: torch.device


class PackedDelta(NamedTuple):
    """One layer's part of an adapter in the layout of its kernel; `rank` is the largest of its modules'."""

    rank: int
    a: Tensor
    b: Tensor


class LowRankDelta(Protocol):
    """The changes of a layer by adapters: B (A x) for some rows of x, with the matrices of the row's slot.

    The x of an embedding are token ids, and A x is the token's column of A.
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
        """y + B (A x), rounded once: y [T, N] in the serving dtype or in float32, contiguous.

        A x is accumulated in float32 and rounded to the serving dtype. `y` may be overwritten; use the returned tensor.

        Args:
            x: [T, K] in the serving dtype; of the embedding, [T] int64.
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


class ExpertChanges(NamedTuple):
    """Changes of experts by the adapters of a step.

    Attributes:
        gate_up, down: of the two products; their slots are those of each expert of each adapter.
        runs: of the rows in the order of experts.
    """

    gate_up: LowRankDelta
    down: LowRankDelta
    runs: AdapterRuns


class MakeDeltas(NamedTuple):
    """Makes the memory of a layer's adapters, all slots empty; used only by servers with adapters."""

    linear: Callable[[DeltaShape], LowRankDelta]
    embedding: Callable[[DeltaShape], LowRankDelta]
