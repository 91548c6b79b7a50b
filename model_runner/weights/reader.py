"""`WeightReader`: a model takes its weights from a checkpoint through it, tensor by tensor, each one checked.

A model's constructor requests tensors by their Hugging Face names; the reader's `TensorStore` knows the files.
Every tensor is read directly into its final memory, so the peak is the model plus one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from ...runtime.errors import ConfigError
from .pinned_staging import Staging, staging_for

if TYPE_CHECKING:
    from ..kernels.blocks.stored_rows import StoredRows
    from ..kernels.quantized_weights import BlockWeight


class Slice(NamedTuple):
    """A part of a tensor: `start`..`stop`-1 along one axis; for example a rank's part of a sharded weight."""

    axis: int
    start: int
    stop: int


class ModuleWeight(NamedTuple):
    """The weight of one linear module in a checkpoint, or a rank's part of it.

    Attributes:
        name: of the module; the format knows the tensors of a module.
        shape: [out, in] of the whole weight.
        part: what to take, in terms of `shape`; None: all of it.
    """

    reader: WeightReader
    name: str
    shape: tuple[int, int]
    part: Slice | None = None


def read_plain(modules: Sequence[ModuleWeight]) -> Tensor:
    """`<name>.weight` of each module in the serving dtype, stacked: [sum of outputs, inputs]."""
    slices = [one.part or Slice(0, 0, one.shape[0]) for one in modules]
    names = [f"{one.name}.weight" for one in modules]
    return modules[0].reader.stacked(names, [one.shape for one in modules], slices=slices)


class TensorStore(Protocol):
    """The tensors of one checkpoint, by their Hugging Face names."""

    def names(self) -> set[str]:
        """All tensors that the model has to take."""
        ...

    def shape(self, name: str, wanted: tuple[int, ...]) -> tuple[int, ...] | None:
        """Shape of a tensor, None if it does not exist; a store of dummy weights returns `wanted`."""
        ...

    def read(self, name: str, out: Tensor, part: Slice | None = None) -> None:
        """Fill `out` (host, contiguous) with a tensor, or with a part of it, converted to the dtype of `out`."""
        ...

    def blocks(self, name: str, part: Slice | None = None) -> StoredRows | BlockWeight | None:
        """A block-quantized matrix as stored, or a part of it; None: the matrix is not block-quantized.

        Args:
            part: a range of outputs, or a range of inputs in whole blocks.
        """
        ...

    def describe(self, name: str) -> str:
        """File and name of an existing tensor; for a missing one, the file that should list it."""
        ...


class WeightReader:
    """Returns tensors on the device and records which the model has taken.

    Attributes:
        dtype: dtype of the returned tensors, unless the model requests another one.
    """

    def __init__(
        self, store: TensorStore, dtype: torch.dtype, device: torch.device, staging: Staging | None = None
    ) -> None:
        """Take the parts; `staging`: memory of tensors on their way; None: what is best for the device."""
        self.dtype = dtype
        self._staging = staging or staging_for(device)
        self._store = store
        self._device = device
        self._left = store.names()

    def describe(self, name: str) -> str:
        """The file of a tensor, see `TensorStore`."""
        return self._store.describe(name)

    def shape(self, name: str, wanted: tuple[int, ...]) -> tuple[int, ...] | None:
        """For weights with optional tensors, or with tensors of one of several shapes."""
        return self._store.shape(name, wanted)

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """One tensor on the device; unlike in `stacked` it may be a scalar, of shape ().

        Raises:
            ConfigError: the tensor is missing or has another shape.
        """
        result = self.peek(name, shape, dtype)
        self._left.discard(name)
        return result

    def peek(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """The same, but the tensor does not count as taken."""
        self._check(name, shape)
        result = self._staging.take(shape, dtype or self.dtype)
        self._store.read(name, result)
        return self._staging.send(result, self._device)

    def stacked(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype | None = None,
        slices: Sequence[Slice] | None = None,
    ) -> Tensor:
        """Several tensors, or a part of each, concatenated along the first axis, on the device.

        Args:
            shapes: shapes of the whole tensors.
            slices: the part of each tensor to take; a name may occur several times, for several parts. None: all.

        Raises:
            ConfigError: a tensor is missing or has another shape.
        """
        for name, shape in zip(names, shapes, strict=True):
            self._check(name, shape)
        taken = list(shapes)
        if slices is not None:
            taken = [_sliced(shape, part) for shape, part in zip(shapes, slices, strict=True)]
        shape = (sum(shape[0] for shape in taken), *taken[0][1:])
        result = self._staging.take(shape, dtype or self.dtype)
        outs = torch.split(result, [shape[0] for shape in taken])
        for idx, (name, shape, out) in enumerate(zip(names, shapes, outs, strict=True)):
            part = slices[idx] if slices is not None and taken[idx] != shape else None
            self._store.read(name, out, part)
            self._left.discard(name)
        return self._staging.send(result, self._device)

    def blocks(
        self, name: str, shape: tuple[int, int], part: Slice | None = None
    ) -> StoredRows | BlockWeight | None:
        """The result is on the host.

        Raises:
            ConfigError: the tensor is missing or has another shape.
        """
        self._check(name, shape)
        found = self._store.blocks(name, part)
        if found is not None:
            self._left.discard(name)
        return found

    def ignore(self, name: str) -> None:
        """Record that the model does not need this tensor, which may or may not exist."""
        self._left.discard(name)

    def ignore_where(self, is_ignored: Callable[[str], bool]) -> None:
        """The same for all tensors of certain names; they can still be taken."""
        self._left = {name for name in self._left if not is_ignored(name)}

    def finish(self) -> None:
        """Check that nothing is left over, and release the memory of tensors on their way.

        Raises:
            ConfigError: the checkpoint holds tensors that the model did not take.
        """
        self._staging.close()
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
    """Read a part of a tensor from a store that can only read (`read(out)`) the whole tensor, [*shape]."""
    whole = torch.empty(shape, dtype=out.dtype)
    read(whole)
    out.copy_(whole.narrow(part.axis, part.start, part.stop - part.start))


def _sliced(shape: tuple[int, ...], part: Slice) -> tuple[int, ...]:
    assert 0 <= part.start < part.stop <= shape[part.axis], f"{part} of {shape}"
    return (*shape[: part.axis], part.stop - part.start, *shape[part.axis + 1 :])
