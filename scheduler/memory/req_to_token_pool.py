"""`ReqToTokenPool`: the rows of running requests, and the pages that hold the tokens of each row.

It stores one page id per page instead of one slot per token. The slot of position p of a row is
`pages[row, p // page_size] * page_size + p % page_size`.
"""

from __future__ import annotations

import numpy as np

from ..arrays import AnyIntArray, IntArray


class ReqToTokenPool:
    """Rows and their page tables.

    Attributes:
        num_rows: R, the number of requests that can run at the same time.
        pages: [R, max pages] int32, the page table.
        num_pages: [R] int32, valid entries of each row of the page table.
        num_leased: [R] int32, the number of those, from the first on, that the prefix cache owns.
        epoch: [R] int32, counts the releases of each row. A step in flight with an older epoch of a row belongs to a
            request that has left the row, even if another request has the row now.
    """

    def __init__(self, num_rows: int, max_pages_per_row: int, page_size: int) -> None:
        self.num_rows = num_rows
        self.page_size = page_size
        self.pages: IntArray = np.zeros((num_rows, max_pages_per_row), dtype=np.int32)
        self._flat_pages = self.pages.reshape(-1)  # the same memory
        self._row_width = np.intp(max_pages_per_row)
        self.num_pages: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.num_leased: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.epoch: IntArray = np.zeros(num_rows, dtype=np.int32)
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._left_rows: list[int] = []

    @property
    def num_free_rows(self) -> int:
        """Rows that `allocate` can return."""
        return len(self._free_rows)

    def allocate(self) -> int:
        """Take a row, without pages."""
        return self._free_rows.pop()

    def release(self, row: int) -> None:
        """Free a row; its pages must have been freed before. The next plan notifies the runner.

        The row may be allocated again at once, although a step in flight still uses it: the runner applies plans in
        order, and the epoch identifies results of the old request.
        """
        self.num_pages[row] = 0
        self.num_leased[row] = 0
        self.epoch[row] += 1
        self._free_rows.append(row)
        self._left_rows.append(row)

    @property
    def has_left_rows(self) -> bool:
        """Whether rows were released since the last `take_left_rows`."""
        return bool(self._left_rows)

    def take_left_rows(self) -> list[int]:
        """Rows released since the last call, for `StepPlan.finished_rows`."""
        left, self._left_rows = self._left_rows, []
        return left

    def append_pages(self, row: int, pages: AnyIntArray) -> None:
        """Add pages at the end of a row."""
        start = int(self.num_pages[row])
        self.pages[row, start : start + len(pages)] = pages
        self.num_pages[row] = start + len(pages)

    def slots(self, row: int, start: int, stop: int) -> IntArray:
        """[stop - start] the slots of consecutive positions of one row."""
        positions = np.arange(start, stop, dtype=np.int32)
        return self.slots_at(np.int32(row), positions)

    def slots_at(self, rows: IntArray | np.int32, positions: IntArray) -> IntArray:
        """[n] the slot of one position of each row."""
        page_size = np.int32(self.page_size)
        page_idx = positions // page_size
        # page * size + position - index * size; 1,000 rows take 13 us, against 24 us with two indices and `divmod`
        slots: IntArray = self._flat_pages.take(rows * self._row_width + page_idx)
        slots -= page_idx
        slots *= page_size
        slots += positions
        return slots
