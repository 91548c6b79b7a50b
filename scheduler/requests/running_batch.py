"""`RunningBatch`: the requests that decode, in the order in which they began to."""

from __future__ import annotations

import itertools

import numpy as np

from ..arrays import EMPTY, BoolArray, IntArray
from .req import Req


class RunningBatch:
    """An ordered set of requests with rows.

    Attributes:
        rows: [B] their pool rows.
        reqs: the same requests. Both are replaced, never changed, so that a batch in flight can keep them.
    """

    __slots__ = ("reqs", "rows")

    def __init__(self) -> None:
        self.rows: IntArray = EMPTY
        self.reqs: list[Req] = []

    def __len__(self) -> int:
        return len(self.reqs)

    def add(self, reqs: list[Req]) -> None:
        """Append requests that begin to decode."""
        if reqs:
            self.rows = np.concatenate([self.rows, np.array([req.row for req in reqs], dtype=np.int32)])
            self.reqs = self.reqs + reqs

    def keep(self, mask: BoolArray) -> None:
        """Drop all requests with a False."""
        self.rows = self.rows[mask]
        self.reqs = list(itertools.compress(self.reqs, mask.tolist()))
