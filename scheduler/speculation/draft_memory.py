"""`DraftMemory`: KV slots for draft tokens. Drafts never cause a retraction."""

from __future__ import annotations

from ...runtime.feasibility import pages_for
from ..memory.row_memory import RowMemory
from ..requests.req import Req


class DraftMemory:
    """How many drafts a request can have, and the pages for them."""

    def __init__(self, memory: RowMemory, most_drafts: int | None = None) -> None:
        """`most_drafts`: of one request in a step; None: no such limit."""
        self._most_drafts = most_drafts
        self._states, self._pool, self._kv = memory.states, memory.pool, memory.kv

    def room(self, req: Req) -> int:
        """The most drafts of a request: the last token of an answer is never an input, so none can follow it."""
        room = int(self._states.max_kv_len[req.row]) - int(self._states.num_computed[req.row]) - 1
        return room if self._most_drafts is None else min(room, self._most_drafts)

    def take_pages(self, reqs: list[Req], counts: list[int]) -> list[int]:
        """Take pages for as many of the drafts as possible; returns the drafts per request."""
        kv, page_size = self._kv, self._kv.page_size
        granted = []
        for req, count in zip(reqs, counts, strict=True):
            computed, num_pages = int(self._states.num_computed[req.row]), int(self._pool.num_pages[req.row])
            # A page per running request must remain: it may need it in the next step.
            missing = pages_for(computed + 1 + count, page_size) - num_pages
            missing = max(0, min(missing, kv.available_pages - len(reqs)))
            count = min(count, (num_pages + missing) * page_size - computed - 1)
            kv.grow(req.row, computed + 1 + count)
            granted.append(count)
        return granted
