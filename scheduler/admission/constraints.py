"""Constraints: rules, other than memory and budgets, that a request must meet to run now. One class per rule.

A constraint concerns single requests: a refused request is skipped, and later ones may start before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..records.verdict import Verdict
from ..requests.req import Req


class Constraint(Protocol):
    """May refuse admission. It counts a request from its admission on, which is before the request has a row."""

    def refusal(self, req: Req) -> Verdict | None:
        """Why a waiting request cannot start now; None if it can."""
        ...

    def admitted(self, req: Req) -> None:
        """The request gets a row at the end of the pass."""
        ...

    def started(self, req: Req) -> None:
        """The request has a row; as for every `RowObserver`."""
        ...

    def stopped(self, req: Req) -> None:
        """The request lost its row."""
        ...


def first_refusal(constraints: Sequence[Constraint], req: Req) -> Verdict | None:
    """The verdict of the first constraint that refuses a request; None if none does."""
    for constraint in constraints:
        verdict = constraint.refusal(req)
        if verdict is not None:
            return verdict
    return None
