"""`list_requests`: the unfinished requests with their figures, for `engine top`.

The reason of each comes from the record of the last pass. The list is made between two steps and costs some
microseconds per listed request; their number is limited.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from ...runtime.messages import LiveRequest, RequestList
from ..records.decision_log import DecisionLog, PassRecord
from ..records.verdict import Reason, Verdict
from ..requests.req import Req, ReqStatus
from ..requests.requests import Requests
from ..step_size.step_target import UNLIMITED


def list_requests(requests: Requests, decisions: DecisionLog, limit: int, now_s: float) -> RequestList:
    """At most `limit` of the unfinished requests; see `RequestList`."""
    last = decisions.last if decisions.num_passes else None
    verdicts = {} if last is None else {each.rid: each for each in (*last.continued, *last.verdicts)}
    listed = islice(_in_order(requests), limit)
    return RequestList(
        [_live(req, verdicts.get(req.rid), last, now_s) for req in listed],
        len(requests),
        {} if last is None else dict(_figures(last)),
    )


def _in_order(requests: Requests) -> Iterator[Req]:
    with_row = sorted(requests.with_row, key=lambda req: req.seq)
    return chain(
        with_row, requests.swapped, requests.waiting, requests.grammar.values(), requests.receiving.values()
    )


def _live(req: Req, verdict: Verdict | None, last: PassRecord | None, now_s: float) -> LiveRequest:
    reason, need, have = None, 0, 0
    if req.status is not ReqStatus.DECODE:
        if verdict is not None:
            reason, need, have = verdict.reason, verdict.need, verdict.have
        else:
            reason = _shared_reason(req, last)
    return LiveRequest(
        req.rid,
        req.status.value,
        req.prompt_len,
        req.output_len,
        req.max_new_tokens,
        req.cached_tokens,
        now_s - req.arrival_s,
        req.num_retractions,
        req.priority,
        reason.value if reason is not None else "",
        reason.text if reason is not None else "",
        need,
        have,
    )


def _shared_reason(req: Req, last: PassRecord | None) -> Reason | None:
    """Why a request without a verdict in the last pass waits; None if it came later or does not wait."""
    if req.status is ReqStatus.WAITING_GRAMMAR:
        return Reason.GRAMMAR_PENDING
    if req.row >= 0 or last is None or req.received_s > last.now_s:
        return None
    return last.rest_reason


def _figures(last: PassRecord) -> Iterator[tuple[str, int]]:
    """Of the last pass; budgets without a limit are left out."""
    yield "step_id", last.step_id
    yield "num_decodes", last.num_decodes
    for when, budget in (("before", last.budget_before), ("after", last.budget_after)):
        for name, tokens in budget._asdict().items() if budget is not None else ():
            if abs(tokens) < UNLIMITED // 2:  # an unlimited budget minus some tokens is still unlimited
                yield f"{name}_{when}", int(tokens)
