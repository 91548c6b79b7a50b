"""Constraints: rules beside memory and computing that a request must meet to run now. One class per rule.

A constraint concerns single requests: whoever it keeps out is passed over, and those behind may go first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, Protocol

from ..records.verdict import AddReqResult, Reason, Verdict
from ..requests.req import MAX_OVERTAKEN, Req, ReqStatus

_WAITING: Final = (ReqStatus.WAITING, ReqStatus.RETRACTED, ReqStatus.SWAPPED)


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
    """At most so many different adapters run at the same time; the model itself does not count.

    Requests of adapters in use could keep another one out for as long as they come. So when one has been overtaken
    `MAX_OVERTAKEN` times, the adapter with fewest requests is drained: nobody new starts with it until that one has
    (SGLang's lora_drainer does the same after a time).
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
        """The one that an adapter is drained for may have started, or ended."""
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
    """The first constraint's that keeps a request out."""
    for constraint in constraints:
        verdict = constraint.refusal(req)
        if verdict is not None:
            return verdict
    return None
