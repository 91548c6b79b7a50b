"""`StageGroup`: the ranks of one pipeline stage, which share its layers, among all ranks of the model."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor

    from .tp_group import TorchGroup


class StageGroup:
    """A `TPGroup` of neighboring ranks of `world`. Decisions at start and barriers are those of all ranks.

    Attributes:
        rank, size: of the stage; 0 <= rank < size.
    """

    def __init__(self, world: TorchGroup, size: int) -> None:
        """Connect the ranks of each stage; all ranks do so at the same time.

        Raises:
            RankLostError: a rank is gone.
        """
        self.rank, self.size = world.rank % size, size
        self._world = world
        self._first = world.rank - self.rank
        self._group = world.divide(size) if size > 1 else None

    @property
    def torch_group(self) -> Any:
        """torch's group of the stage's ranks; None for one rank."""
        return self._group

    def wait_for_others(self) -> AbstractContextManager[None]:
        return self._world.wait_for_others()

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.size > 1:
            self._world.run(dist.all_reduce, x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return self._world.gather(x, self.size, group=self._group) if self.size > 1 else x

    def broadcast(self, x: Tensor) -> Tensor:
        if self.size > 1:
            self._world.run(dist.broadcast, x, self._first, group=self._group)
        return x

    def min_over_ranks(self, value: int) -> int:
        """Over the ranks of all stages."""
        return self._world.min_over_ranks(value)

    def meet(self, place: str) -> None:
        """Wait until the ranks of all stages are at this place."""
        self._world.meet(place)
