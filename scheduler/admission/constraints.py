"""Constraints: rules, other than memory and budgets, that a request must meet to run now. One class per rule.

A constraint concerns single requests: a refused request is skipped, and later ones may start before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, Protocol

from ..records.verdict import AddReqResult, Reason, Verdict
from ..requests.req import MAX_OVERTAKEN, Req, ReqStatus

_WAITING: Final = (ReqStatus.WAITING, ReqStatus.RETRACTED, ReqStatus.SWAPPED)


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


class MaxLoras:
    """At most `max_loras` different adapters run at the same time; the base model does not count.

    Without a further rule, new requests of the adapters in use could block another adapter without end. So after a
    request was overtaken `MAX_OVERTAKEN` times, the adapter with the fewest requests is drained: no new request starts
    with it until the overtaken one has started. SGLang's `lora_drainer` does the same after a time.
    """

    __slots__ = ("_drained", "_drained_for", "_in_use", "_max_loras")

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self._in_use: Counter[str] = Counter()
        self._drained = ""  # an adapter
        self._drained_for: Req | None = None

    def refusal(self, req: Req) -> Verdict | None:
        if not req.lora_id:
            return None
        self._end_drain()
        in_use = req.lora_id in self._in_use
        if in_use and req.lora_id != self._drained:
            return None
        if not in_use and len(self._in_use) < self._max_loras and self._drained_for in (None, req):
            return None
        if not in_use and self._drained_for is None and req.num_overtaken >= MAX_OVERTAKEN:
            self._drained = min(self._in_use, key=lambda lora_id: (self._in_use[lora_id], lora_id))
            self._drained_for = req
        num_adapters = len(self._in_use) + (not in_use)
        return Verdict(req.rid, AddReqResult.SKIP, Reason.LORA_LIMIT, need=num_adapters, have=self._max_loras)

    def _end_drain(self) -> None:
        """Stop draining if the request that it was for has started or ended."""
        if self._drained_for is not None and self._drained_for.status not in _WAITING:
            self._drained, self._drained_for = "", None

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
    """The verdict of the first constraint that refuses a request; None if none does."""
    for constraint in constraints:
        verdict = constraint.refusal(req)
        if verdict is not None:
            return verdict
    return None
