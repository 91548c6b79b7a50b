"""`WeightReader`: how a model takes its weights out of a checkpoint, tensor by tensor, each one checked.

A model's constructor asks for what it needs by Hugging Face's names; the store behind the reader knows the files.
Every tensor is read straight into the memory where it stays, so the peak is the model plus one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...runtime.errors import ConfigError


class TensorStore(Protocol):
    """Named tensors of one checkpoint, by the names Hugging Face gives them."""

    def names(self) -> set[str]:
        """All tensors the model has to take."""
        ...

    def shape(self, name: str, wanted: tuple[int, ...]) -> tuple[int, ...] | None:
        """Shape of a tensor, None if there is none; a store that makes tensors up returns `wanted`."""
        ...

    def read(self, name: str, out: Tensor) -> None:
        """Fill `out` (host, contiguous, the tensor's shape) and convert to its dtype."""
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

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """One tensor on the device.

        Raises:
            ConfigError: it is missing or has another shape.
        """
        return self.stacked([name], [shape], dtype)

    def stacked(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype | None = None
    ) -> Tensor:
        """Several tensors, one below the other (along the first axis), on the device.

        Raises:
            ConfigError: one is missing or has another shape.
        """
        for name, shape in zip(names, shapes, strict=True):
            self._check(name, shape)
        num_rows = sum(shape[0] for shape in shapes)
        result = torch.empty((num_rows, *shapes[0][1:]), dtype=dtype or self.dtype)
        for name, part in zip(names, torch.split(result, [shape[0] for shape in shapes]), strict=True):
            self._store.read(name, part)
            self._left.discard(name)
        return result.to(self._device)

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
