"""`PageMemory`: whole pages of a `KVPool` as bytes, and where they lie; for transfers to other engines and disks.

The checkpoints of a `StatePool` are moved as pages, too: those of its `checkpoint_views`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Region(NamedTuple):
    """The memory of one tensor: page i begins at `address + i * page_bytes`."""

    address: int
    page_bytes: int
    num_pages: int


class PageMemory:
    """See the module. Pages are read and written by the thread of a transfer: nothing else uses those pages meanwhile.

    Attributes:
        regions: one for each tensor, keys and values of each layer and their scales.
        tensors: (dtype, bytes of a page) of each.
        device_id: number of the GPU; None on the CPU.
    """

    def __init__(self, views: Sequence[Tensor]) -> None:
        """`views`: [pages, ...] each, on one device."""
        self._pages = [view.view(view.shape[0], -1).view(torch.uint8) for view in views]
        self.regions = [Region(pages.data_ptr(), pages.shape[1], pages.shape[0]) for pages in self._pages]
        self.tensors = tuple(
            (str(view.dtype).removeprefix("torch."), pages.shape[1])
            for view, pages in zip(views, self._pages, strict=True)
        )
        device = self._pages[0].device
        self.device_id = device.index if device.type == "cuda" else None
        self._device = device
        self._host = [pages.numpy() for pages in self._pages] if device.type == "cpu" else []

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all tensors."""
        return sum(region.page_bytes for region in self.regions)

    def read(self, page_ids: npt.NDArray[np.int32]) -> list[memoryview]:
        """The bytes of some pages ([n] ids), one buffer for each tensor. Copies; waits for the device."""
        index = torch.from_numpy(page_ids.astype(np.int64)).to(self._device)
        return [pages.index_select(0, index).cpu().numpy().data.cast("B") for pages in self._pages]

    def write(self, page_ids: npt.NDArray[np.int32], frames: Sequence[memoryview | bytes]) -> None:
        """Write what `read` returned into other pages ([n] ids); returns when it is there.

        Raises:
            ValueError: the number or the sizes of the frames are wrong.
        """
        if len(frames) != len(self._pages):
            raise ValueError(f"{len(frames)} frames for {len(self._pages)} tensors")
        index = torch.from_numpy(page_ids.astype(np.int64)).to(self._device)
        for pages, frame in zip(self._pages, frames, strict=True):
            source = np.frombuffer(frame, dtype=np.uint8)
            if source.size != len(page_ids) * pages.shape[1]:
                raise ValueError(
                    f"a frame of {source.size} bytes for {len(page_ids)} pages of {pages.shape[1]}"
                )
            data = torch.from_numpy(source.copy()).view(len(page_ids), -1)
            pages.index_copy_(0, index, data.to(self._device))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def read_rows(self, page_ids: npt.NDArray[np.int32], rows: npt.NDArray[np.uint8]) -> None:
        """Copy some pages ([n] ids) into rows, [n, page_bytes]: in each the tensors follow one another.

        On the CPU it starts no threads: a team of torch's own for this thread would compete with that of the steps.
        """
        frames = self._host or [
            np.frombuffer(frame, np.uint8).reshape(len(page_ids), -1) for frame in self.read(page_ids)
        ]
        index = page_ids if self._host else slice(None)
        begin = 0
        for pages in frames:
            end = begin + pages.shape[1]
            rows[:, begin:end] = pages[index]
            begin = end

    def write_rows(self, page_ids: npt.NDArray[np.int32], rows: npt.NDArray[np.uint8]) -> None:
        """Write what `read_rows` returned into other pages ([n] ids); returns when it is there."""
        ends = np.cumsum([region.page_bytes for region in self.regions])
        parts = np.split(rows, ends[:-1], axis=1)
        if self._host:
            for pages, part in zip(self._host, parts, strict=True):
                pages[page_ids] = part
        else:
            self.write(page_ids, [np.ascontiguousarray(part).data.cast("B") for part in parts])
