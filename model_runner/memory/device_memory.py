"""The free memory of a device, the peak that a piece of work takes, and one retry when memory runs out."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, Protocol, TypeVar

import torch

from ...launch.resolve.memory_budget import size_text
from ...runtime.errors import ConfigError


class DeviceMemory(Protocol):
    """The memory of one device, as seen by this process."""

    def free_bytes(self) -> int:
        """Free bytes of the device, after this process has returned its unused memory."""
        ...

    def watch_peak(self) -> Callable[[], int]:
        """Start watching; returns a function that gives the peak since then, in bytes above the present use."""
        ...


class CudaMemory:
    """Counts the memory reserved by torch's allocator, not only by tensors: fragments are not available either."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_bytes(self) -> int:
        self._give_back()
        return torch.cuda.mem_get_info(self._device)[0]

    def watch_peak(self) -> Callable[[], int]:
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
    """Context around an allocation at start: turns an out-of-memory error into a `ConfigError`.

    Args:
        what: what the memory is for.
        memory: None where nothing is measured.
        way_out: how the user can avoid the error.

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
    """None on the CPU: other processes share its memory, so it is not measured and the estimate is used."""
    return CudaMemory(device) if device.type == "cuda" else None


T = TypeVar("T")
P = ParamSpec("P")

logger = logging.getLogger(__name__)


def retry_after_oom(device: torch.device, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Make a call that may be made twice; if memory runs out, free the allocator's cached memory and repeat it."""
    try:
        return call(*args, **kwargs)
    except torch.OutOfMemoryError as error:
        logger.warning("out of memory: retry after freeing the allocator's cached memory: %s", error)
    # Outside the `except` block: the error's traceback holds the tensors of the call.
    free_cached_memory(device)
    return call(*args, **kwargs)


def free_cached_memory(device: torch.device) -> None:
    """Return the allocator's unused memory to the device, so that other sizes fit."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
