"""`WeightReader`: how a model takes its weights out of a checkpoint, tensor by tensor, each one checked.

A model's constructor asks for what it needs by Hugging Face's names; the store behind the reader knows the files.
Every tensor is read straight into the memory where it stays, so the peak is the model plus one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from ...runtime.errors import ConfigError

if TYPE_CHECKING:
    from ..kernels.quantized_weights import BlockWeight


class Slice(NamedTuple):
    """A part of a tensor: `start`..`stop`-1 along one axis; what a rank takes of a weight that several share."""

    axis: int
    start: int
    stop: int


class TensorStore(Protocol):
    """Named tensors of one checkpoint, by the names Hugging Face gives them."""

    def names(self) -> set[str]:
        """All tensors the model has to take."""
        ...

    def shape(self, name: str, wanted: tuple[int, ...]) -> tuple[int, ...] | None:
        """Shape of a tensor, None if there is none; a store that makes tensors up returns `wanted`."""
        ...

    def read(self, name: str, out: Tensor, part: Slice | None = None) -> None:
        """Fill `out` (host, contiguous) with a tensor, or with a part of it, converted to the dtype of `out`."""
        ...

    def blocks(self, name: str, part: Slice | None = None) -> BlockWeight | None:
        """A matrix that is stored as whole numbers in blocks, as it is, or a part of it; None: it is stored otherwise.

        Args:
            part: outputs, or inputs in whole blocks.
        """
        ...

    def describe(self, name: str) -> str:
        """File and name under which an existing tensor is stored; for one that is missing, the file that should say."""
        ...


class WeightReader:
    """Hands out tensors and remembers which.

    Attributes:
        dtype: of every tensor handed out, unless the model asks for another one.
    """

    def __init__(self, store: TensorStore, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self._store = store
        self._device = device
        self._left = store.names()

    def shape(self, name: str, wanted: tuple[int, ...]) -> tuple[int, ...] | None:
        """See `TensorStore`; for weights of which some tensors may be missing, or have one of several shapes."""
        return self._store.shape(name, wanted)

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """One tensor on the device; unlike those of `stacked` it may be a single number, of the shape ().

        Raises:
            ConfigError: it is missing or has another shape.
        """
        result = self.peek(name, shape, dtype)
        self._left.discard(name)
        return result

    def peek(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """The same, but it counts as not taken."""
        self._check(name, shape)
        result = torch.empty(shape, dtype=dtype or self.dtype)
        self._store.read(name, result)
        return result.to(self._device)

    def stacked(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype | None = None,
        slices: Sequence[Slice] | None = None,
    ) -> Tensor:
        """Several tensors, or a part of each, one below the other (along the first axis), on the device.

        Args:
            shapes: of the whole tensors.
            slices: what to take of each; a name may come several times, for several parts. None: all of it.

        Raises:
            ConfigError: one is missing or has another shape.
        """
        for name, shape in zip(names, shapes, strict=True):
            self._check(name, shape)
        taken = list(shapes)
        if slices is not None:
            taken = [_sliced(shape, part) for shape, part in zip(shapes, slices, strict=True)]
        result = torch.empty((sum(shape[0] for shape in taken), *taken[0][1:]), dtype=dtype or self.dtype)
        outs = torch.split(result, [shape[0] for shape in taken])
        for idx, (name, shape, out) in enumerate(zip(names, shapes, outs, strict=True)):
            part = slices[idx] if slices is not None and taken[idx] != shape else None
            self._store.read(name, out, part)
            self._left.discard(name)
        return result.to(self._device)

    def blocks(self, name: str, shape: tuple[int, int], part: Slice | None = None) -> BlockWeight | None:
        """See `TensorStore`; on the host.

        Raises:
            ConfigError: it is missing or has another shape.
        """
        self._check(name, shape)
        found = self._store.blocks(name, part)
        if found is not None:
            self._left.discard(name)
        return found

    def ignore(self, name: str) -> None:
        """The model does not need this tensor, whether or not it is there."""
        self._left.discard(name)

    def finish(self) -> None:
        """Check that nothing is left over.

        Raises:
            ConfigError: the checkpoint holds tensors that the model did not take.
        """
        if self._left:
            first = min(self._left)
            raise ConfigError(
                f"{self._store.describe(first)}: unexpected tensor {first!r} ({len(self._left)} in all); "
                "the weights belong to another architecture than the configuration says, check config.json"
            )

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        found = self._store.shape(name, shape)
        where = self._store.describe(name)
        if found is None:
            raise ConfigError(
                f"{where}: tensor {name!r} is missing; download the model again, "
                "or check that config.json belongs to it"
            )
        if found != shape:
            raise ConfigError(
                f"{where}: tensor {name!r} has the shape {list(found)}, but the configuration asks for {list(shape)}; "
                "the weights and the configuration do not belong together"
            )


def cut_from_whole(read: Callable[[Tensor], None], shape: tuple[int, ...], out: Tensor, part: Slice) -> None:
    """A part of a tensor from a store that can only read (`read(out)`) the whole of it, [*shape]."""
    whole = torch.empty(shape, dtype=out.dtype)
    read(whole)
    out.copy_(whole.narrow(part.axis, part.start, part.stop - part.start))


def _sliced(shape: tuple[int, ...], part: Slice) -> tuple[int, ...]:
    assert 0 <= part.start < part.stop <= shape[part.axis], f"{part} of {shape}"
    return (*shape[: part.axis], part.stop - part.start, *shape[part.axis + 1 :])
