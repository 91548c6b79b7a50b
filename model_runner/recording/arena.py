"""`Arena`: memory for what recorded steps make on their way, the same for all of them.

A recording holds addresses, so its tensors must be where they were whenever it is replayed. Replays run one after the
other, and none reads what another has left, so all recordings lie on top of each other in the same memory; within one,
a tensor's block is given to the next one as soon as Python drops it, as torch's allocator would.

A block is a numpy array over the arena, and a tensor over that array keeps it alive, through all its views. When the
last of them is gone, so is the array, and the block is free again.
"""

from __future__ import annotations

import weakref
from bisect import insort
from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT: Final = 64  # bytes, a cache line
_CHUNK_BYTES: Final = 1 << 20

Bytes = npt.NDArray[np.uint8]


class Arena:
    """Chunks of memory that never move and are never given back.

    Attributes:
        num_bytes: of all chunks; what nobody has touched of them takes no memory.
    """

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []
        self.num_bytes = 0

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape, strides and dtype, with memory of the arena; its numbers are arbitrary."""
        num_bytes = tensor.untyped_storage().nbytes()
        block = self._take(max(_ALIGNMENT, -(-num_bytes // _ALIGNMENT) * _ALIGNMENT))
        numbers = torch.from_numpy(block).view(tensor.dtype)
        return numbers.as_strided(tensor.shape, tensor.stride())

    def borrowed(self, tensor: Tensor) -> Tensor:
        """The same tensor without a claim on its block: others will write there."""
        for chunk in self._chunks:
            start = tensor.data_ptr() - chunk.memory.ctypes.data
            if 0 <= start < len(chunk.memory):
                stop = start + tensor.element_size() * tensor.numel()
                assert tensor.is_contiguous() and stop <= len(chunk.memory)
                return torch.from_numpy(chunk.memory[start:stop]).view(tensor.dtype).view(tensor.shape)
        raise AssertionError("the tensor is not of this arena")

    def fill(self, byte: int) -> None:
        """Overwrite everything; what is to survive must lie elsewhere."""
        for chunk in self._chunks:
            chunk.memory.fill(byte)

    def _take(self, num_bytes: int) -> Bytes:
        for chunk in self._chunks:
            if (block := chunk.take(num_bytes)) is not None:
                return block
        # As large as all before it, so that there are few; from the system as it is needed.
        chunk = _Chunk(max(_CHUNK_BYTES, self.num_bytes, num_bytes))
        self._chunks.append(chunk)
        self.num_bytes += len(chunk.memory)
        block = chunk.take(num_bytes)
        assert block is not None
        return block


class _Chunk:
    """One piece of memory, and what of it is free: (start, stop) pairs in order, with something taken between them."""

    def __init__(self, num_bytes: int) -> None:
        memory = np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        self.memory: Bytes = memory[start : start + num_bytes]
        self._free = [(0, num_bytes)]
        # A block may come back at any moment, even within `take`: the garbage collector runs where it likes.
        self._dropped: deque[tuple[int, int]] = deque()

    def take(self, num_bytes: int) -> Bytes | None:
        """The first block that is large enough: what was used last is most likely still in the cache."""
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
