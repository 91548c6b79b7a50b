"""`RankedRows`: the pages of all ranks of an engine as those of one, for the store of rank 0.

    a record     [ page of rank 0 | the same page of rank 1 | ... ]      one key, one checksum

Tensor-parallel ranks have the same pages with other heads, pipeline stages with other layers. All parts of a page are
in one record, so the ranks cannot have pages of different moments: a record that is damaged is a miss for all of them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ...runtime.transport.rank_transfer import ReadRows, WriteRows
from ..transfer.link.pages import AllOf
from ..transfer.link.ranks import Ranks
from .page_mover import PageRows, Pages


class RankedRows:
    """A `PageRows`. The other ranks move their parts at the same time; a call ends when all have.

    If a rank fails, `TransferError` is raised when no other rank touches the pages any more.
    """

    def __init__(
        self,
        own: PageRows,
        ranks: Ranks,
        settled_step: Callable[[], int],
        *,
        states: bool = False,
    ) -> None:
        """Take the parts.

        Args:
            own: of rank 0.
            ranks: the others, after `Ranks.wait`.
            settled_step: the last step that the scheduler has settled; the other ranks may still be at its end.
            states: these are slots for states and not pages.
        """
        self._own = own
        self._ranks = ranks
        tensors = [worker.states if states else worker.tensors for worker in ranks.workers]
        others = [sum(page_bytes for _, page_bytes in each) for each in tensors]
        self._ends = np.cumsum([own.page_bytes, *others])
        self._settled_step = settled_step
        self._states = states

    @property
    def page_bytes(self) -> int:
        return int(self._ends[-1])

    def read_rows(self, page_ids: Pages, rows: npt.NDArray[np.uint8]) -> None:
        order = ReadRows(0, page_ids.tobytes(), self._settled_step(), self._states)
        own, *others = np.split(rows, self._ends[:-1], axis=1)
        reads = [self._ranks.order(rank, order) for rank in range(1, 1 + len(others))]
        try:
            self._own.read_rows(page_ids, own)
        finally:
            self._ranks.wait_for(AllOf(reads))
        for read, part in zip(reads, others, strict=True):
            part[:] = np.frombuffer(read.frames[0], np.uint8).reshape(part.shape)

    def write_rows(self, page_ids: Pages, rows: npt.NDArray[np.uint8]) -> None:
        order = WriteRows(0, page_ids.tobytes(), self._settled_step(), self._states)
        own, *others = np.split(rows, self._ends[:-1], axis=1)
        frames = [[np.ascontiguousarray(part).data.cast("B")] for part in others]
        writes = [self._ranks.order(rank, order, frame) for rank, frame in enumerate(frames, 1)]
        try:
            self._own.write_rows(page_ids, own)
        finally:
            self._ranks.wait_for(AllOf(writes))
