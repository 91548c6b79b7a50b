"""`Explainer`: answers clients who ask why a request fared as it did, from what the decision log still has."""

from __future__ import annotations

import msgspec

from ..runtime.messages import Explain, Explanation
from .cache_miss import MissKind
from .decision_log import DecisionLog, DecisionRecord, PassRecord
from .why import explain


class Explainer:
    """Answers `Explain`."""

    __slots__ = ("_decisions",)

    def __init__(self, decisions: DecisionLog) -> None:
        self._decisions = decisions

    def explain(self, message: Explain) -> Explanation:
        """One sentence and a table."""
        return explain(map(_for_clients, self._decisions), message.rid, message.explain_id)


def _for_clients(record: DecisionRecord) -> DecisionRecord:
    """What another tenant has cached under its salt is the operator's to know (`engine why --log`), not a client's."""
    elsewhere = MissKind.OTHER_NAMESPACE
    if not isinstance(record, PassRecord) or all(miss.kind is not elsewhere for miss in record.cache_misses):
        return record
    misses = [
        miss._replace(kind=MissKind.COLD) if miss.kind is elsewhere else miss for miss in record.cache_misses
    ]
    return msgspec.structs.replace(record, cache_misses=misses)
