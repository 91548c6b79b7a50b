"""`Explainer`: answers clients who ask why a request fared as it did, from what the decision log still has."""

from __future__ import annotations

import msgspec

from ..runtime.messages import Explain, Explanation
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
    """What others do under their salts is the operator's to know (`engine why --log`), not a client's."""
    if not isinstance(record, PassRecord) or not record.cache_misses:
        return record
    return msgspec.structs.replace(record, cache_misses=[miss.for_clients() for miss in record.cache_misses])
