"""`InputBuffers` and `OutputBuffers`: copies of a step's arrays between host and device.

All uploads of a step go through `InputBuffers`: without a copy on the CPU, through pinned memory and without waiting on
a GPU. Results are fetched through `OutputBuffers`: the copies are queued, so a launch never waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .device_memory import retry_after_oom

T = TypeVar("T")
P = ParamSpec("P")

_ALIGNMENT: Final = 16  # bytes; enough for any dtype, and for kernels that read four words at once

Array = npt.NDArray[Any]


class InputBuffers:
    """Uploads to one device, and what else needs its memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pinned = device.type == "cuda"

    def retried(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of a call that may be made twice: again if the device's memory runs out; see `retry_after_oom`."""
        return retry_after_oom(self.device, call, *args, **kwargs)

    def put(self, array: Array) -> Tensor:
        """The array on the device, in its dtype. On the CPU the tensor shares its memory: do not reuse the array."""
        tensor = torch.from_numpy(array)
        if self.device.type == "cpu":
            return tensor
        if self._pinned:
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def put_all(self, arrays: list[Array]) -> list[Tensor]:
        """The same for several arrays, with one copy for all of them."""
        if self.device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        starts, num_bytes = layout(arrays)
        staging = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        fill(staging.numpy(), arrays, starts)
        return views(staging.to(self.device, non_blocking=True), arrays, starts)


def layout(arrays: list[Array]) -> tuple[list[int], int]:
    """Byte offset of each array when all are stored one after the other, aligned; and the total bytes."""
    starts, end = [], 0
    for array in arrays:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append(start)
        end = start + array.nbytes
    return starts, end


def fill(staging: npt.NDArray[np.uint8], arrays: list[Array], starts: list[int]) -> None:
    """Copy each array to its offset."""
    for array, start in zip(arrays, starts, strict=True):
        staging[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def views(staging: Tensor, arrays: list[Array], starts: list[int]) -> list[Tensor]:
    """Tensors of the arrays' dtypes and shapes over the bytes that `fill` wrote."""
    return [
        staging[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]


class OutputBuffers:
    """Copies a step's results from one device to the host, without waiting; the counterpart of `InputBuffers`.

    The caller knows when the copies are done: it waits for the end of its `DeviceTimer`, which encloses them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_host = device.type == "cpu"

    def fetch(self, tensor: Tensor) -> Tensor:
        """A host tensor that holds `tensor` once the device has done all work queued so far.

        On the CPU it is the tensor itself. On a GPU its memory is pinned, and torch reuses it only after the copy is
        done.
        """
        if self._is_host:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def fetch_pair(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """The same for two contiguous tensors; if they are views of one piece of memory, with one copy of all of it."""
        memory = first.untyped_storage()
        if self._is_host or memory.data_ptr() != second.untyped_storage().data_ptr():
            return self.fetch(first), self.fetch(second)
        host = self.fetch(torch.empty(0, dtype=torch.uint8, device=self.device).set_(memory))
        return _part(host, first), _part(host, second)


def _part(memory: Tensor, like: Tensor) -> Tensor:
    """The part of a copy of a tensor's memory that is the tensor."""
    start = like.storage_offset() * like.itemsize
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)
