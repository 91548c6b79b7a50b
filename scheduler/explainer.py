"""`Explainer`: answers why a request fared as it did, from what the decision log still has."""

from __future__ import annotations

from ..runtime.messages import Explain, Explanation
from .decision_log import DecisionLog
from .why import explain


class Explainer:
    """Answers `Explain`."""

    __slots__ = ("_decisions",)

    def __init__(self, decisions: DecisionLog) -> None:
        self._decisions = decisions

    def explain(self, message: Explain) -> Explanation:
        """One sentence and a table."""
        return explain(self._decisions, message.rid, message.explain_id)
