"""`StateSlots`: where the states of requests are kept, and at which tokens checkpoints are taken.

A running row owns the state slot with its number. It is exact at the row's last computed token only, so it serves no
other request. A *checkpoint* is a copy that stays as it is. A row plans checkpoints (`plan`) in the step that computes
their last token; when that step is settled, the prefix cache gets them with the pages before that token (`take_due`).
In slots:

    free + rows (running rows, and checkpoints that they have planned) + loading (from a disk) + checkpoints (of the
    prefix cache) == total

A slot may be freed while a step in flight writes to it: the runner executes steps in launch order, as for pages.

Checkpoints are taken within pages' borders:

- at the end of a prompt, before its last token, which is always computed
- where the prompts of a call for probabilities of labels part: all but the first start there
- where the prompt leaves what the cache knows: probably the end of a prefix that many prompts share
- at the end of a chunk that is not the last one, for requests that wait for this prefix
- at the end of each image: another question may follow it
- every `interval` tokens of prompts and answers, for prefixes that end elsewhere, and for retracted requests
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final

import numpy as np

from ..arrays import IntArray
from ..requests.req import Chunk

_MOST_OF_A_CHUNK: Final = 4
"""A chunk may take one of so many checkpoints: a long prompt does not displace all others."""

DropOldest = Callable[[Collection[int]], bool]
"""Frees the oldest checkpoint of the prefix cache that is not in a collection; False: there is none."""


class StateSlots:
    """The slots 1..`num_checkpoints`. With none, a model has no state layers, or prefixes are not kept.

    Attributes:
        loading: slots that a disk tier writes to.
        stored: slots of checkpoints that a disk tier reads, once for each read; they stay in the prefix cache.
    """

    def __init__(self, num_checkpoints: int = 0, *, interval_pages: int = 1, page_size: int = 1) -> None:
        """Start with all slots free; `connect` before the first `plan`."""
        self.num_checkpoints: Final = num_checkpoints
        self._interval = interval_pages * page_size
        self._page_size = page_size
        self._free = list(range(num_checkpoints, 0, -1))
        self._planned: dict[int, list[tuple[int, int]]] = {}
        self._drop_oldest: DropOldest = lambda keep: False
        self.loading: set[int] = set()
        self.stored: list[int] = []

    def connect(self, drop_oldest: DropOldest) -> None:
        """Take from the prefix cache's checkpoints, when no slot is free."""
        self._drop_oldest = drop_oldest

    @property
    def num_free(self) -> int:
        """Slots for checkpoints without an owner."""
        return len(self._free)

    def plan(
        self, chunks: Sequence[Chunk], decode_rows: IntArray, num_computed: IntArray, num_rounds: int
    ) -> bytes:
        """Plan the checkpoints of a step: `StepPlan.state_saves`.

        Args:
            chunks: the prompt chunks of the step.
            decode_rows: [B] the other rows.
            num_computed: [R] tokens that were computed, or are being computed, before this step.
            num_rounds: tokens that each of `decode_rows` computes.
        """
        if not self.num_checkpoints:
            return b""
        self._drop_unmade(num_computed)
        saves: list[int] = []
        # Not these: the step reads them, and a slot of its own may be written before; or a disk tier reads them.
        reads = {*self.stored, *(chunk.req.checkpoint for chunk in chunks if chunk.is_first)}
        for chunk in chunks:
            row = chunk.req.row
            for position in sorted(self._of_chunk(chunk)):
                self._save(row, position, reads, saves)
        for idx, position in self._of_decodes(num_computed[decode_rows], num_rounds):
            self._save(int(decode_rows[idx]), position, reads, saves)
        return np.array(saves, dtype=np.int32).tobytes() if saves else b""

    def _drop_unmade(self, num_computed: IntArray) -> None:
        """Free what was planned for rounds of a multi-step decode that did not run."""
        for row in [row for row, planned in self._planned.items() if planned[-1][0] > num_computed[row]]:
            planned = self._planned[row]
            while planned and planned[-1][0] > num_computed[row]:
                self.free(planned.pop()[1])
            if not planned:
                del self._planned[row]

    def _save(self, row: int, position: int, reads: Collection[int], saves: list[int]) -> None:
        if not self._free and not self._drop_oldest(reads):
            return
        checkpoint = self._free.pop()
        self._planned.setdefault(row, []).append((position, checkpoint))
        saves += (row, position, checkpoint)

    def _of_chunk(self, chunk: Chunk) -> set[int]:
        """The positions for checkpoints in a chunk, the most useful ones if there are many."""
        start, end = chunk.start, chunk.start + chunk.length
        last_page = (chunk.req.fill_len - 1) // self._page_size * self._page_size
        shared_page = chunk.req.shared_len // self._page_size * self._page_size
        wanted = [shared_page, last_page, chunk.req.tree_len]  # a shared_page of 0 is in no chunk
        if not chunk.is_last:
            wanted.append(end // self._page_size * self._page_size)
        if chunk.req.images is not None:
            wanted += [position // self._page_size * self._page_size for position in chunk.req.images.ends]
        wanted += range(end // self._interval * self._interval, start, -self._interval)
        most = max(1, self.num_checkpoints // _MOST_OF_A_CHUNK)
        distinct = dict.fromkeys(position for position in wanted if start < position <= end)
        return set(list(distinct)[:most])

    def _of_decodes(self, positions: IntArray, num_rounds: int) -> Iterator[tuple[int, int]]:
        """(index, position) of each decode that reaches a checkpoint."""
        next_at = (positions // self._interval + 1) * self._interval
        for idx in np.flatnonzero(next_at <= positions + num_rounds).tolist():
            yield idx, int(next_at[idx])

    def rows_with_due(self, num_settled: IntArray) -> list[int]:
        """The rows with a planned checkpoint at a settled token; [R] settled tokens."""
        return [row for row, planned in self._planned.items() if planned[0][0] <= num_settled[row]]

    def take_due(self, row: int, num_settled: int) -> list[tuple[int, int]]:
        """Take a row's planned checkpoints within its first `num_settled` tokens: (position, checkpoint)."""
        planned = self._planned.get(row, [])
        due = [each for each in planned if each[0] <= num_settled]
        if due:
            left = planned[len(due) :]
            if left:
                self._planned[row] = left
            else:
                del self._planned[row]
        return due

    def take(self) -> int:
        """Take a slot for a state that a disk tier loads; 0: none can be had now."""
        if not self._free and not self._drop_oldest(self.stored):
            return 0
        checkpoint = self._free.pop()
        self.loading.add(checkpoint)
        return checkpoint

    def free(self, checkpoint: int) -> None:
        """Take back a slot."""
        self._free.append(checkpoint)

    def drop_planned(self, row: int) -> None:
        """Free what a row has planned."""
        for _, checkpoint in self._planned.pop(row, ()):
            self.free(checkpoint)

    def planned(self) -> list[int]:
        """The slots that rows have planned; for checks."""
        return [checkpoint for planned in self._planned.values() for _, checkpoint in planned]

    def free_slots(self) -> list[int]:
        """The free slots; for checks."""
        return list(self._free)
