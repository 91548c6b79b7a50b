"""`DeviceMemory`: how much of a device's memory is free, and how much of it something takes at most."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from ...runtime.errors import ConfigError
from ...runtime.resolve.memory_budget import size_text


class DeviceMemory(Protocol):
    """One device, as this process sees it."""

    def free_bytes(self) -> int:
        """What nobody has, after everything unused was given back."""
        ...

    def watch_peak(self) -> Callable[[], int]:
        """Watch from now on; returns what tells the most bytes that were taken at a time beyond those taken now."""
        ...


class CudaMemory:
    """What torch's allocator has reserved, not what tensors occupy: the pieces it cannot use are gone as well."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_bytes(self) -> int:
        """See `DeviceMemory`."""
        self._give_back()
        return torch.cuda.mem_get_info(self._device)[0]

    def watch_peak(self) -> Callable[[], int]:
        """See `DeviceMemory`."""
        self._give_back()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)

        def peak_bytes() -> int:
            torch.cuda.synchronize(self._device)
            return torch.cuda.max_memory_reserved(self._device) - before

        return peak_bytes

    def _give_back(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


@contextmanager
def explained(what: str, memory: DeviceMemory | None, way_out: str) -> Iterator[None]:
    """Around what takes memory at start.

    Args:
        memory: None where nothing is measured.

    Raises:
        ConfigError: memory has run out.
    """
    free_bytes = memory.free_bytes() if memory is not None else 0
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the device has {size_text(free_bytes)} free, too little for {what}: {error}; {way_out}"
        ) from error


def make_device_memory(device: torch.device) -> DeviceMemory | None:
    """None where nothing is measured: the memory of the CPU is shared with everybody, so the estimate stands there."""
    return CudaMemory(device) if device.type == "cuda" else None
