"""`explain_live`: `explain` for the requests of a running scheduler.

If the decision log has dropped the first records of an unfinished request, the request itself supplies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ...runtime.messages import Explanation, base_rid
from ..records.decision_log import Arrived, DecisionLog, Settled
from ..requests.req import Req, ReqStatus
from .request_story import Beginning
from .why import explain

_ADVICE: Final = (
    "; the file of --decision-log, where the server has one, keeps all of them (`engine why --log FILE`)"
)


def explain_live(decisions: DecisionLog, reqs: Mapping[str, Req], rid: str) -> Explanation:
    """Explain the history of a request; `reqs`: the unfinished ones, by rid."""
    name = _name_of(decisions, reqs, rid)
    req = reqs.get(name) if name is not None else None
    return explain(
        decisions,
        rid,
        names=(name,) if name is not None else (),
        beginning=_beginning_of(req) if req is not None else None,
        advice=_ADVICE,
        for_clients=True,
    )


def _name_of(decisions: DecisionLog, reqs: Mapping[str, Req], rid: str) -> str | None:
    """The request that `rid` names; see `explain`. A finished request has a `Settled` record, unless the log has
    dropped it. So an unknown rid is found without reading the verdicts of all passes.
    """
    names = (rid, f"{rid}-0")
    for name in names:
        if name in reqs:
            return name
    found = None
    for record in decisions:
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
