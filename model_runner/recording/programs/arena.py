"""`Arena`: memory for the intermediate tensors of recorded steps, shared by all recordings.

A recording holds addresses, so its tensors must have the same addresses in each replay. Replays run one after the
other, and none reads the results of another, so all recordings use the same memory. Within a recording a tensor's block
is reused as soon as Python drops the tensor, as in torch's allocator.

A block is a numpy array over the arena. A tensor over that array and all its views keep the array alive. When the last
of them is deleted, the array is deleted too, and the block is free.
"""

from __future__ import annotations

import weakref
from bisect import insort
from collections import deque
from typing import Final, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...forward_batch import FeaturedStates, StageStates

_ALIGNMENT: Final = 64  # bytes, a cache line
_CHUNK_BYTES: Final = 1 << 20

Result = TypeVar("Result", bound=Tensor | StageStates | FeaturedStates)
Bytes = npt.NDArray[np.uint8]


class Arena:
    """Chunks of memory that never move and are never freed.

    Attributes:
        num_bytes: bytes of all chunks; only the parts that were written are resident.
    """

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []
        self.num_bytes = 0

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape, strides and dtype, with memory of the arena; its values are arbitrary."""
        num_bytes = tensor.untyped_storage().nbytes()
        block = self._take(max(_ALIGNMENT, -(-num_bytes // _ALIGNMENT) * _ALIGNMENT))
        numbers = torch.from_numpy(block).view(tensor.dtype)
        return numbers.as_strided(tensor.shape, tensor.stride())

    def result(self, result: Result) -> Result:
        """The same result without ownership of its blocks; a stage may return memory that is not of this arena."""
        if isinstance(result, Tensor):
            return cast("Result", self.borrowed(result))
        if isinstance(result, FeaturedStates):
            return cast("Result", FeaturedStates(*map(self.borrowed, result)))
        return cast(
            "Result",
            StageStates(*(self.borrowed(x) if self._holds(x) else x for x in (result.x, result.residual))),
        )

    def _holds(self, tensor: Tensor) -> bool:
        starts = ((chunk.memory.ctypes.data, len(chunk.memory)) for chunk in self._chunks)
        return any(0 <= tensor.data_ptr() - start < num_bytes for start, num_bytes in starts)

    def borrowed(self, tensor: Tensor) -> Tensor:
        """The same tensor without ownership of its block: later tensors may overwrite it."""
        for chunk in self._chunks:
            start = tensor.data_ptr() - chunk.memory.ctypes.data
            if 0 <= start < len(chunk.memory):
                stop = start + tensor.element_size() * tensor.numel()
                assert tensor.is_contiguous() and stop <= len(chunk.memory)
                return torch.from_numpy(chunk.memory[start:stop]).view(tensor.dtype).view(tensor.shape)
        raise AssertionError("the tensor is not of this arena")

    def fill(self, byte: int) -> None:
        """Overwrite all memory of the arena."""
        for chunk in self._chunks:
            chunk.memory.fill(byte)

    def _take(self, num_bytes: int) -> Bytes:
        for chunk in self._chunks:
            if (block := chunk.take(num_bytes)) is not None:
                return block
        # As large as all chunks before it, so there are few; the system provides the memory when it is written.
        chunk = _Chunk(max(_CHUNK_BYTES, self.num_bytes, num_bytes))
        self._chunks.append(chunk)
        self.num_bytes += len(chunk.memory)
        block = chunk.take(num_bytes)
        assert block is not None
        return block


class _Chunk:
    """One piece of memory and its free ranges: (start, stop) pairs in order, separated by taken ranges."""

    def __init__(self, num_bytes: int) -> None:
        memory = np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        self.memory: Bytes = memory[start : start + num_bytes]
        self._free = [(0, num_bytes)]
        # A block may be dropped at any time, even within `take`, because the garbage collector may run there.
        self._dropped: deque[tuple[int, int]] = deque()

    def take(self, num_bytes: int) -> Bytes | None:
        """The first block that is large enough: recently used memory is most likely still in the cache."""
        self._collect()
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= num_bytes:
                self._free[index : index + 1] = (
                    [(start + num_bytes, stop)] if stop - start > num_bytes else []
                )
                block = self.memory[start : start + num_bytes]
                weakref.finalize(block, self._dropped.append, (start, start + num_bytes)).atexit = False
                return block
        return None

    def _collect(self) -> None:
        while self._dropped:
            self._give_back(*self._dropped.popleft())

    def _give_back(self, start: int, stop: int) -> None:
        free = self._free
        insort(free, (start, stop))
        index = free.index((start, stop))
        if index + 1 < len(free) and free[index + 1][0] == stop:
            stop = free.pop(index + 1)[1]
            free[index] = (start, stop)
        if index and free[index - 1][1] == start:
            free[index - 1 : index + 1] = [(free[index - 1][0], stop)]
