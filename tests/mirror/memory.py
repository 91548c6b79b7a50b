"""Memory of a mirror: allocations on the device between red zones, and page-locked memory of the host.

New memory is poison until something writes it. Around each allocation lie bytes that nothing may write and that are NaN
or no index for what reads them; they are compared when the allocation is freed, and by `check`. The n-th allocation
from now can be made to fail.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .faults import Faults

Bytes = npt.NDArray[np.uint8]

ALIGNMENT = 512
"""Torch's allocator on CUDA has it; Triton compiles other kernels for pointers that are not multiples of 16."""
RED_ZONE = 256  # bytes on each side
_NAN = 0xFF  # each byte of a NaN, in all floats
_NO_INDEX = 0x5A  # each byte of an integer that is no index, token or slot
_TOTAL_BYTES = 1 << 30


def poison_byte(dtype: torch.dtype) -> int:
    """The byte that memory of a dtype is filled with."""
    if dtype == torch.bool:
        return 1
    return _NAN if dtype.is_floating_point else _NO_INDEX


def poison(tensor: Tensor) -> None:
    """Overwrite all numbers of a host tensor."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        tensor.view(-1).view(torch.uint8).fill_(poison_byte(tensor.dtype))
    else:
        tensor.copy_(_poisoned_number(tensor.dtype))


def _poisoned_number(dtype: torch.dtype) -> Tensor:
    return torch.full((dtype.itemsize,), poison_byte(dtype), dtype=torch.uint8).view(dtype)[0]


class DeviceMemory:
    """The allocator. A figure of bytes is of tensors, without red zones.

    Attributes:
        num_allocations: so far.
        live_bytes, peak_bytes: now, and the most since `reset_peak`.
    """

    def __init__(self, faults: Faults, total_bytes: int = _TOTAL_BYTES) -> None:
        self.total_bytes = total_bytes
        self.num_allocations = 0
        self.live_bytes = self.peak_bytes = 0
        self._faults = faults
        self._live: dict[int, tuple[Bytes, int, int]] = {}
        self._fail_at: int | None = None

    @contextmanager
    def failing_at(self, number: int | None) -> Iterator[list[int]]:
        """Let the n-th allocation from now fail, counted from 0 (None: none); yields a list, not empty once it has."""
        self._fail_at = None if number is None else self.num_allocations + number
        self._failed: list[int] = []
        try:
            yield self._failed
        finally:
            self._fail_at = None

    def allocate(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """New memory as a host tensor of exactly its bytes."""
        number, self.num_allocations = self.num_allocations, self.num_allocations + 1
        if number == self._fail_at:
            self._failed.append(number)
            raise torch.OutOfMemoryError("CUDA out of memory: planted")
        extent = 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        nbytes = extent * dtype.itemsize
        if self.live_bytes + nbytes > self.total_bytes:
            raise torch.OutOfMemoryError(f"CUDA out of memory: tried to allocate {nbytes} bytes")
        memory = np.empty(nbytes + 2 * RED_ZONE + ALIGNMENT, dtype=np.uint8)
        start = RED_ZONE + -(memory.ctypes.data + RED_ZONE) % ALIGNMENT
        memory[start - RED_ZONE : start] = memory[start + nbytes : start + nbytes + RED_ZONE] = _NAN
        inner = memory[start : start + nbytes]
        inner[:] = poison_byte(dtype)
        self._live[number] = memory, start, nbytes
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        # Torch's storage holds the array, and nothing else does.
        weakref.finalize(inner, self._free, number).atexit = False
        with torch.inference_mode(False):
            return torch.from_numpy(inner).view(dtype).as_strided(tuple(shape), tuple(stride))

    def check(self) -> None:
        """Note each live allocation with a changed red zone."""
        for place in self._live.values():
            self._check(*place)

    def reset_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    def _free(self, number: int) -> None:
        place = self._live.pop(number)
        self.live_bytes -= place[2]
        self._check(*place)

    def _check(self, memory: Bytes, start: int, nbytes: int) -> None:
        before, after = memory[start - RED_ZONE : start], memory[start + nbytes : start + nbytes + RED_ZONE]
        if (before != _NAN).any() or (after != _NAN).any():
            side = "before" if (before != _NAN).any() else "after"
            self._faults.add("red zone", f"written {side} an allocation of {nbytes} bytes")
            before[:] = after[:] = _NAN  # each write is one fault


class HostMemory:
    """Which memory of the host is page-locked: only from and to it does a device copy while the host continues."""

    def __init__(self) -> None:
        self._pinned: dict[int, int] = {}  # address -> bytes
        self._registered: dict[int, int] = {}
        self._reads: dict[int, tuple[int, int]] = {}  # by queued copies: address and bytes
        self._num_reads = 0

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Page-locked memory, poisoned."""
        memory = np.empty(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, dtype=np.uint8)
        memory[:] = poison_byte(dtype)
        address = memory.ctypes.data
        self._pinned[address] = memory.nbytes
        weakref.finalize(memory, self._pinned.pop, address, None).atexit = False
        with torch.inference_mode(False):
            return torch.from_numpy(memory).view(dtype).view(tuple(shape))

    def pin(self, tensor: Tensor) -> Tensor:
        """As `Tensor.pin_memory`: a page-locked copy."""
        return self.allocate(tensor.shape, tensor.dtype).copy_(tensor)

    def will_read(self, tensor: Tensor) -> Callable[[], object]:
        """Note that a queued copy reads memory; the result is called when it has."""
        self._num_reads += 1
        number = self._num_reads
        self._reads[number] = tensor.data_ptr(), tensor.nbytes
        return partial(self._reads.pop, number, None)

    def is_to_be_read(self, tensor: Tensor) -> bool:
        """Whether a queued copy reads a part of this memory."""
        first, nbytes = tensor.data_ptr(), tensor.nbytes
        return any(start < first + nbytes and first < start + size for start, size in self._reads.values())

    def is_pinned(self, tensor: Tensor) -> bool:
        first, nbytes = tensor.data_ptr(), tensor.nbytes
        places: Any = (*self._pinned.items(), *self._registered.items())
        return any(start <= first and first + nbytes <= start + size for start, size in places)

    # ------------------------------------------------------------ torch.cuda.cudart()

    def cudaHostRegister(self, address: int, nbytes: int, _flags: int) -> int:  # noqa: N802
        self._registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self._registered.pop(address, None)
        return 0
