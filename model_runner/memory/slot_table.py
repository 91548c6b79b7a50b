"""`SlotTable`: the device's mirror of the scheduler's table of KV slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from ...runtime.step_plan import StepPlan
    from .io_buffers import InputBuffers

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


class SlotTable:
    """The KV slot of each position of each row's request. Every entry is initially the dummy slot.

    Attributes:
        req_to_token: [rows + 1, max_model_len] int32, device; the last row is for padding: its slots
            stay the dummy slot.
    """

    def __init__(self, num_rows: int, max_model_len: int, buffers: InputBuffers) -> None:
        shape = num_rows + 1, max_model_len
        self.req_to_token = torch.zeros(shape, dtype=torch.int32, device=buffers.device)
        self._buffers = buffers
        self._flat = self.req_to_token.view(-1)
        self._flat_np: Int32s | None = self._flat.numpy() if buffers.device.type == "cpu" else None

    @property
    def width(self) -> int:
        """Number of positions per row."""
        return self.req_to_token.shape[1]

    def update(self, plan: StepPlan) -> None:
        """Write the changes of a plan: the slots of cached prefixes, and replaced slots.

        The slots of the step's new tokens are written by its executor.
        """
        news = [(new.row, 0, new.prefix_loc) for new in plan.new_reqs if new.prefix_loc]
        news += [(update.row, update.start, update.loc) for update in plan.row_updates]
        if not news:
            return
        slots = [np.frombuffer(loc, dtype=np.int32) for _, _, loc in news]
        indices = [
            row * self.width + np.arange(start, start + len(loc))
            for (row, start, _), loc in zip(news, slots, strict=True)
        ]
        self.store(*self._buffers.put_all([*_last_wins(np.concatenate(indices), np.concatenate(slots))]))

    def store(self, indices: Tensor, slots: Tensor) -> None:
        """Write `slots` [n] int32 at `indices` [n] int64 of the flat table, without repeats; both on the device."""
        if self._flat_np is None:
            self._flat.index_copy_(0, indices, slots)
        else:  # with cold caches, as between two steps, an operation of torch takes some 40 us
            self._flat_np[indices.numpy()] = slots.numpy()


def _last_wins(indices: Int64s, slots: Int32s) -> tuple[Int64s, Int32s]:
    """Remove repeated indices and keep the last slot of each: torch does not define the order of writes."""
    unique, last = np.unique(indices[::-1], return_index=True)
    return unique, slots[::-1][last]
