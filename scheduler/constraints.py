"""Constraints: rules beside memory and computing that a request must meet to run now. One class per rule.

A constraint concerns single requests: whoever it keeps out is passed over, and those behind may go first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from .req import Req
from .verdict import AddReqResult, Reason, Verdict


class Constraint(Protocol):
    """Has a say in admission. It counts a request from its admission on, which is before it has a row."""

    def refusal(self, req: Req) -> Verdict | None:
        """Why a waiting request cannot start now; None if it can."""
        ...

    def admitted(self, req: Req) -> None:
        """It will be given a row at the end of the pass."""
        ...

    def started(self, req: Req) -> None:
        """It was given a row; as for every `RowObserver`."""
        ...

    def stopped(self, req: Req) -> None:
        """It lost its row."""
        ...


class MaxLoras:
    """At most so many different adapters run at the same time; the model itself does not count."""

    __slots__ = ("_in_use", "_max_loras")

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self._in_use: Counter[str] = Counter()

    def refusal(self, req: Req) -> Verdict | None:
        if not req.lora_id or req.lora_id in self._in_use or len(self._in_use) < self._max_loras:
            return None
        return Verdict(
            req.rid,
            AddReqResult.SKIP,
            Reason.LORA_LIMIT,
            need=len(self._in_use) + 1,
            have=self._max_loras,
        )

    def admitted(self, req: Req) -> None:
        if req.lora_id:
            self._in_use[req.lora_id] += 1

    def started(self, req: Req) -> None:
        pass

    def stopped(self, req: Req) -> None:
        if req.lora_id:
            self._in_use[req.lora_id] -= 1
            if not self._in_use[req.lora_id]:
                del self._in_use[req.lora_id]


def first_refusal(constraints: Sequence[Constraint], req: Req) -> Verdict | None:
    """The first constraint's that keeps a request out."""
    for constraint in constraints:
        verdict = constraint.refusal(req)
        if verdict is not None:
            return verdict
    return None
