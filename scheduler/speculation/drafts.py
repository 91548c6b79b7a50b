"""`Drafts`: the draft tokens of one step."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from ..arrays import EMPTY, IntArray


class Drafts(NamedTuple):
    """Proposed next tokens of outputs, which the step verifies.

    Attributes:
        counts: [B] number of drafts of each of the step's B decoding requests; empty if there are no drafts.
        token_ids: [D] the drafts, request after request.
    """

    counts: IntArray
    token_ids: IntArray

    def __bool__(self) -> bool:
        return len(self.token_ids) > 0


NO_DRAFTS: Final = Drafts(EMPTY, EMPTY)


def drafts_of(per_request: list[list[int]]) -> Drafts:
    """The drafts of B requests, from one list per request. Lists may be empty."""
    counts = np.array([len(each) for each in per_request], dtype=np.int32)
    flat = [token_id for each in per_request for token_id in each]
    return Drafts(counts, np.array(flat, dtype=np.int32)) if flat else NO_DRAFTS
