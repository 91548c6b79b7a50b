"""`Explainer`: answers `Explain` messages about the fate of a request, from the records in the decision log.

An answer takes some milliseconds, in which no step is planned, so there is at most one per pass; further questions wait
for later passes. If the log has dropped the first records of an unfinished request, the request itself supplies them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

from ...runtime.messages import Explain, Explanation, base_rid
from ..records.decision_log import Arrived, DecisionLog, Settled
from ..requests.req import Req, ReqStatus
from .request_story import Beginning
from .why import explain

_ADVICE: Final = (
    "; the file of --decision-log, where the server has one, keeps all of them (`engine why --log FILE`)"
)


class Explainer:
    """Answers `Explain`, each question once."""

    def __init__(self, decisions: DecisionLog, reqs: Mapping[str, Req]) -> None:
        """`reqs`: a live view of the unfinished requests, by rid."""
        self._decisions = decisions
        self._reqs = reqs
        self._questions: deque[Explain] = deque()
        self._answered = False  # since the last pass

    @property
    def has_questions(self) -> bool:
        """Whether a pass is needed to answer the next one."""
        return bool(self._questions)

    def ask(self, message: Explain) -> Explanation | None:
        """The answer; None if it must wait for a pass."""
        if self._answered:
            self._questions.append(message)
            return None
        self._answered = True
        return self._explain(message)

    def next_pass(self) -> Explanation | None:
        """A pass begins: the answer to the oldest waiting question, if there is one."""
        self._answered = bool(self._questions)
        return self._explain(self._questions.popleft()) if self._questions else None

    def _explain(self, message: Explain) -> Explanation:
        name = self._name_of(message.rid)
        req = self._reqs.get(name) if name is not None else None
        return explain(
            self._decisions,
            message.rid,
            message.explain_id,
            names=(name,) if name is not None else (),
            beginning=_beginning_of(req) if req is not None else None,
            advice=_ADVICE,
            for_clients=True,
        )

    def _name_of(self, rid: str) -> str | None:
        """The request that `rid` names; see `explain`. A finished request has a `Settled` record, unless the log has
        dropped it. So an unknown rid is found without reading the verdicts of all passes.
        """
        names = (rid, f"{rid}-0")
        for name in names:
            if name in self._reqs:
                return name
        found = None
        for record in self._decisions:
            if isinstance(record, Settled):
                for left in record.left:
                    if left.rid in names or base_rid(left.rid) in names:
                        found = left.rid  # the last one, if the request was submitted again
        return found


def _beginning_of(req: Req) -> Beginning:
    needs_grammar = ReqStatus.WAITING_GRAMMAR in req.entered_s
    arrived = Arrived(
        req.received_s,
        req.rid,
        req.prompt_len,
        req.max_new_tokens,
        req.priority,
        req.tenant,
        req.group,
        needs_grammar,
        req.num_delivered,
    )
    grammar_s = req.queued_s if needs_grammar else None
    return Beginning(arrived, grammar_s, req.entered_s.get(ReqStatus.PREFILL))
