"""`Drafts`: the draft tokens of one step; `DraftMemory`: their KV slots; `may_speculate`: a test of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from ...runtime.feasibility import pages_for
from ..arrays import EMPTY, IntArray
from ..memory.kv_memory import RowMemory
from ..requests.req import Req


class Drafts(NamedTuple):
    """Proposed next tokens of outputs, which the step verifies.

    Attributes:
        counts: [B] number of drafts of each of the step's B decoding requests; empty if there are no drafts.
        token_ids: [D] the drafts, request after request.
        methods: [D] uint8, the source of each draft: an index into `DRAFT_METHODS`.
    """

    counts: IntArray
    token_ids: IntArray
    methods: bytes

    def __bool__(self) -> bool:
        return len(self.token_ids) > 0


NO_DRAFTS: Final = Drafts(EMPTY, EMPTY, b"")


def drafts_of(per_request: list[list[int]], methods: Sequence[bytes]) -> Drafts:
    """The drafts of B requests, from one list and the methods of as many drafts per request. Lists may be empty."""
    counts = np.array([len(each) for each in per_request], dtype=np.int32)
    flat = [token_id for each in per_request for token_id in each]
    return Drafts(counts, np.array(flat, dtype=np.int32), b"".join(methods)) if flat else NO_DRAFTS


class DraftMemory:
    """Number of drafts that a request can have, and the pages for them. Drafts never cause a retraction."""

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


def may_speculate(req: Req) -> bool:
    """Whether a request may have drafts: it does not refuse them, and its logits depend on no sampled token."""
    return req.sampling.speculative and not req.sampling.depends_on_output
