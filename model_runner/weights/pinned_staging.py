"""`PinnedStaging`: page-locked host memory through which weights go to a GPU, two buffers in turns.

A tensor is read from its file into one buffer, and the GPU's copy of it runs while the next one is read into the other.
From ordinary memory the driver would copy it once more, into buffers of its own, and nothing would overlap.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from torch import Tensor

STAGING_BYTES: Final = 256 << 20
"""Size of one buffer: the layers of a model of 8B in bfloat16 fit, its embedding does not and is copied unstaged."""


class Staging(Protocol):
    """Host memory of tensors on their way to the device."""

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialized memory, valid until the next but one is taken."""
        ...

    def send(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The tensor, of the memory taken last, on the device."""
        ...

    def close(self) -> None:
        """Wait for all copies and release the memory."""
        ...


class PlainMemory:
    """New memory for each tensor; on the CPU it is the tensor's own."""

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def send(self, tensor: Tensor, device: torch.device) -> Tensor:
        return tensor.to(device)

    def close(self) -> None:
        pass


class PinnedStaging:
    """See the module."""

    def __init__(
        self,
        num_bytes: int = STAGING_BYTES,
        *,
        pin: Callable[[Tensor], Callable[[], None]] | None = None,
        record: Callable[[], Callable[[], None]] | None = None,
    ) -> None:
        """Reserve nothing yet.

        Args:
            num_bytes: of each buffer.
            pin: page-locks a tensor; returns the call that undoes it.
            record: marks this point of the device's stream; returns the call that waits for it.
        """
        self._num_bytes = num_bytes
        self._pin, self._record = pin or _page_lock, record or _event
        self._buffers: list[_Buffer] = []
        self._is_staged = False

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor that is larger than a buffer gets memory of its own."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        self._is_staged = 0 < num_bytes <= self._num_bytes
        if not self._is_staged:
            return torch.empty(shape, dtype=dtype)
        if not self._buffers:
            # Memory that is still locked must not be freed, also where nothing calls `close`.
            self._release = weakref.finalize(self, _release, self._buffers)
        if len(self._buffers) < 2:
            self._buffers.append(_Buffer(self._num_bytes, self._pin))
        else:
            self._buffers.append(self._buffers.pop(0))
        buffer = self._buffers[-1]
        buffer.wait_until_sent()
        return buffer.memory[:num_bytes].view(dtype).view(shape)

    def send(self, tensor: Tensor, device: torch.device) -> Tensor:
        result = tensor.to(device, non_blocking=self._is_staged, copy=True)
        if self._is_staged:
            self._buffers[-1].wait_until_sent = self._record()
        return result

    def close(self) -> None:
        if self._buffers:
            self._release()


class _Buffer:
    def __init__(self, num_bytes: int, pin: Callable[[Tensor], Callable[[], None]]) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8)
        self.unpin = pin(self.memory)
        self.wait_until_sent: Callable[[], None] = lambda: None


def _release(buffers: list[_Buffer]) -> None:
    for buffer in buffers:
        buffer.wait_until_sent()
        buffer.unpin()
    buffers.clear()


def _page_lock(memory: Tensor) -> Callable[[], None]:
    """Page-lock memory; without the right to do so it stays as it is, and copies are slower."""
    cudart: Any = torch.cuda.cudart()
    if int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
        return lambda: None
    return lambda: cudart.cudaHostUnregister(memory.data_ptr())


def _event() -> Callable[[], None]:
    event = torch.cuda.Event()
    event.record()
    wait: Callable[[], None] = event.synchronize
    return wait


def staging_for(device: torch.device) -> Staging:
    """The staging memory of weights for a device."""
    return PinnedStaging() if device.type == "cuda" else PlainMemory()
