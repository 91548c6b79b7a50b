"""`Calls`: answers the calls of the tokenizer manager: flush, pin, hints, explain, list, load and unload adapters.

An explanation is read from the decision log; if that has dropped the first records of an unfinished request, the
request itself supplies them. The list of requests takes the reason of each from the record of the last pass; it is made
between two steps and costs some microseconds per listed request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Final, assert_never

from msgspec.structs import replace

from ...runtime.messages import (
    AdapterDone,
    Call,
    CallAnswer,
    CallDone,
    EndReasoning,
    Explain,
    Explanation,
    FlushCache,
    FlushCacheDone,
    HintAction,
    HintDone,
    HintOutcome,
    HintSession,
    ListRequests,
    ListSessions,
    LiveRequest,
    LoadAdapter,
    Pause,
    PauseDone,
    PinDone,
    PinPrefix,
    ReasoningDone,
    RequestList,
    Resume,
    SessionList,
    SessionState,
    UnloadAdapter,
    base_rid,
)
from ..adapters.adapter_slots import AdapterSlots
from ..adapters.adapter_table import AdapterTable
from ..arrays import TOKEN_ID_BYTES
from ..memory.kv_memory import KVMemory
from ..pause import Pauses
from ..prefix_cache.base import PrefixCache, namespace_of
from ..records.decision_log import Arrived, DecisionLog, PassRecord, Settled
from ..records.verdict import Reason, Verdict
from ..requests.intake import reason_to_refuse_pin
from ..requests.req import Req, ReqStatus
from ..requests.requests import Requests
from ..step_size.step_target import UNLIMITED
from .request_story import Beginning
from .why import explain

EndUsers = Callable[[str, str, int, float], None]
"""Ends the requests of an adapter: its fingerprint, the error, its HTTP status, the time."""


class Calls:
    """See the module. The answers are kept until `take`.

    An explanation takes some milliseconds, in which no step is planned, so there is at most one per pass; further
    questions wait for later passes.
    """

    def __init__(
        self,
        kv: KVMemory,
        cache: PrefixCache,
        requests: Requests,
        decisions: DecisionLog,
        *,
        adapters: AdapterTable,
        adapter_slots: AdapterSlots,
        pauses: Pauses,
        max_pinned_tokens: int,
    ) -> None:
        """Take the parts.

        Args:
            max_pinned_tokens: the quota, for the answer; the prefix cache enforces it.
        """
        self._kv = kv
        self._cache = cache
        self._requests = requests
        self._decisions = decisions
        self._adapters = adapters
        self._adapter_slots = adapter_slots
        self._pauses = pauses
        self._max_pinned_tokens = max_pinned_tokens
        self._done: list[CallDone] = []
        self._flushes: dict[int, FlushCacheDone] = {}  # by call, those that the tier has not done
        self._questions: deque[tuple[int, Explain]] = deque()
        self._explained = False  # since the last pass

    @property
    def has_questions(self) -> bool:
        """Whether a pass is needed to explain the next request."""
        return bool(self._questions)

    def take(self) -> list[CallDone]:
        """The answers since the last call, in order."""
        done, self._done = self._done, []
        return done

    def handle(self, call: Call, now_s: float, end_users: EndUsers) -> None:
        """Answer a call, now or later."""
        request = call.request
        answer: CallAnswer | None
        match request:
            case FlushCache():
                dropped, kept = self._kv.flush() if request.device else (0, 0)
                if request.host:
                    self._kv.flush_host()
                answer = FlushCacheDone(dropped * self._kv.page_size, kept * self._kv.page_size)
                if request.tier:
                    self._flushes[call.call_id] = answer
                    return  # answered by `flushed`
            case PinPrefix():
                answer = self._pin(request, now_s)
            case HintSession():
                answer = self._hint(request, now_s)
            case EndReasoning(rid=rid):
                answer = ReasoningDone(self._end_reasoning(rid))
            case Explain():
                self._questions.append((call.call_id, request))
                if not self._explained:
                    self._explain_next()
                return
            case ListRequests():
                answer = list_requests(self._requests, self._decisions, request.limit, now_s)
            case ListSessions():
                answer = list_sessions(self._cache, request.limit, self._kv.page_size, now_s)
            case LoadAdapter():
                answer = self._adapters.load(call.call_id, request)
            case UnloadAdapter():
                answer = self._unload(request, now_s, end_users)
            case Pause(mode=mode):
                self._pauses.begin(call.call_id, mode)
                return  # answered by `nothing_in_flight`
            case Resume():
                self._answer(self._pauses.end(), PauseDone(paused=False))
                answer = PauseDone(paused=False)
            case _:
                assert_never(request)
        if answer is not None:
            self._answer([call.call_id], answer)

    def nothing_in_flight(self) -> None:
        """No step is in flight, and none was planned: the scheduler is paused if it was told so."""
        self._answer(self._pauses.on_idle(), PauseDone(paused=True))

    def flushed(self, call_id: int, error: str) -> None:
        """The tier has forgotten what a `FlushCache` was for, or says why it may not have."""
        if (answer := self._flushes.pop(call_id, None)) is not None:
            self._answer([call_id], replace(answer, error=error))

    def next_pass(self) -> None:
        """A pass begins: explain the request of the oldest waiting question, if there is one."""
        self._explained = False
        self._explain_next()

    def adapter_read(self, store_id: int, error: str, now_s: float, end_users: EndUsers) -> None:
        """An adapter is read. If it could not be, the requests that wait for it fail."""
        fingerprint, call_ids = self._adapters.read(store_id, error)
        self._answer(call_ids, AdapterDone(error))
        if error and fingerprint:
            end_users(fingerprint, error, 400, now_s)

    def _answer(self, call_ids: Iterable[int], answer: CallAnswer) -> None:
        self._done += [CallDone(call_id, answer) for call_id in call_ids if call_id]

    def _explain_next(self) -> None:
        if self._questions:
            self._explained = True
            call_id, question = self._questions.popleft()
            self._answer([call_id], explain_live(self._decisions, self._requests.by_id, question.rid))

    def _end_reasoning(self, rid: str) -> bool:
        """Mark a request, for the masks of its next token: a step in flight may have sampled one without the end."""
        req = self._requests.by_id.get(rid)
        if req is None or req.matcher is None or not req.matcher.copy().end_reasoning():
            return False
        req.ends_reasoning = True
        return True

    def _unload(self, request: UnloadAdapter, now_s: float, end_users: EndUsers) -> AdapterDone:
        if fingerprint := self._adapters.remove(request.store_id):
            end_users(fingerprint, "the LoRA adapter of the request was unloaded", 409, now_s)
            self._adapter_slots.unloaded(fingerprint)
        return AdapterDone()

    def _pin(self, request: PinPrefix, now_s: float) -> PinDone:
        """Pin the cached part of a prefix, up to the quota."""
        refusal = reason_to_refuse_pin(request)
        if refusal is not None:
            return PinDone(0, 0, refusal)
        page_size = self._kv.page_size
        until_s = now_s + request.ttl_s if request.ttl_s > 0 else None
        namespace = namespace_of(request.extra_key, request.lora_id)
        pinned_tokens = self._kv.pin(namespace, request.input_ids, until_s) * page_size
        asked_tokens = len(request.input_ids) // TOKEN_ID_BYTES
        reason = ""
        if until_s is not None and pinned_tokens < asked_tokens // page_size * page_size:
            reason = self._reason_for_less(pinned_tokens)
        elif pinned_tokens < asked_tokens and until_s is not None:
            reason = f"prefixes are kept in whole pages of {page_size} tokens"
        return PinDone(pinned_tokens, asked_tokens, reason)

    def _hint(self, hint: HintSession, now_s: float) -> HintDone:
        """Do what a client asks for a session."""
        session, size = self._cache.session(hint.session), self._kv.page_size
        if hint.action is HintAction.OPEN:
            if session is not None:
                return HintDone(HintOutcome.REJECTED, "is open already")
            if (opened := self._cache.begin_turn(hint.session, hint.tenant, "", now_s)) is not None:
                opened.num_turns = 0
            return HintDone(HintOutcome.ACCEPTED)
        if session is None:
            return HintDone(HintOutcome.MISSING, "no session with this key is known")
        if hint.action is HintAction.RETAIN:
            kept, asked = self._cache.promise(session, now_s + hint.ttl_s)
            outcome = HintOutcome.ACCEPTED if kept == asked else HintOutcome.CLIPPED
            words = f"{kept * size} of {asked * size} tokens are kept for {hint.ttl_s:g} s"
            return HintDone(outcome, words if kept == asked else f"{words}; the quota is --pin-fraction")
        close = hint.action is HintAction.CLOSE
        detail = f"{self._cache.demote(session, close=close) * size} tokens are evicted first"
        running = sum(req.session is session for req in self._requests.by_id.values())
        if close and running:
            return HintDone(
                HintOutcome.DEFERRED, f"{detail}; of {running} unfinished requests, when they end"
            )
        return HintDone(HintOutcome.ACCEPTED, detail)

    def _reason_for_less(self, pinned_tokens: int) -> str:
        page_size, quota = self._kv.page_size, self._max_pinned_tokens
        if self._kv.pinned_pages * page_size >= quota:
            return (
                f"the quota is {quota} tokens and all of it is in use; wait, unpin others, or "
                f"raise --pin-fraction"
            )
        if not pinned_tokens and self._kv.num_pins * page_size >= quota:
            return (
                f"there are {self._kv.num_pins} pins, and no more are allowed than the quota has pages; wait, "
                "unpin others, or raise --pin-fraction"
            )
        return "only what is cached can be pinned; send the prompt as a request first"


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
        session="" if req.session is None else req.session.key,
        turn=req.turn,
        num_images=0 if req.images is None else len(req.images.ends),
        background=req.background,
    )
    grammar_s = req.queued_s if needs_grammar else None
    return Beginning(arrived, grammar_s, req.entered_s.get(ReqStatus.PREFILL))


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


def list_sessions(cache: PrefixCache, limit: int, page_size: int, now_s: float) -> SessionList:
    """At most `limit` sessions; see `SessionList`."""
    states = [
        SessionState(
            session.key,
            session.num_turns,
            len(session.ends),
            num_pages * page_size,
            now_s - session.last_s,
        )
        for session, num_pages in cache.newest_sessions(limit)
    ]
    return SessionList(states, cache.num_sessions)


def _in_order(requests: Requests) -> Iterator[Req]:
    with_row = sorted(requests.with_row, key=lambda req: req.seq)
    return chain(
        with_row,
        requests.swapped,
        requests.waiting,
        requests.background,
        requests.grammar.values(),
        requests.receiving.values(),
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
        req.background,
    )


def _shared_reason(req: Req, last: PassRecord | None) -> Reason | None:
    """Reason why a request without a verdict in the last pass waits; None if it came later or does not wait."""
    if req.status is ReqStatus.WAITING_GRAMMAR:
        return Reason.GRAMMAR_PENDING
    if req.row >= 0 or last is None or req.received_s > last.now_s:
        return None
    return last.rest_reason


def _figures(last: PassRecord) -> Iterator[tuple[str, int]]:
    """The figures of the last pass; budgets without a limit are left out."""
    yield "step_id", last.step_id
    yield "num_decodes", last.num_decodes
    for when, budget in (("before", last.budget_before), ("after", last.budget_after)):
        for name, tokens in budget._asdict().items() if budget is not None else ():
            if abs(tokens) < UNLIMITED // 2:  # an unlimited budget minus some tokens is still unlimited
                yield f"{name}_{when}", int(tokens)
