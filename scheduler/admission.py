"""`Admission`: the prefill half of a pass: whose prompts are computed in this step, and how much of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .arrays import IntArray
from .budget import PrefillBudget
from .constraints import Constraint, first_refusal
from .decision_log import PassRecord
from .estimator.base import OutputEstimator
from .host_memory import HostMemory
from .kv_memory import KVMemory
from .partial_prefills import PartialPrefills, promised_tokens
from .policy.base import MAX_OVERTAKEN, SchedulePolicy
from .preemption import Preemption
from .prefill_adder import Chunk, PrefillAdder
from .prefix import Prefix
from .req import Req, ReqStatus
from .req_to_token_pool import ReqToTokenPool
from .requests import Requests
from .row_states import RowStates
from .shared_prefixes import SharedPrefixes
from .siblings import Siblings
from .stats import SchedulerStats
from .step_limits import StepLimits
from .verdict import AddReqResult, Reason, Verdict

_MAX_SKIPPED = 64
"""Requests passed over by rules that concern them alone; looking at more of them in a pass would cost too much."""

_MAX_AGED = 256
"""Ageing looks at so many of the longest waiting requests in each pass; the others' turn comes when those have left."""


class Admission:
    """Offers waiting requests to a PrefillAdder in the policy's order, and starts those it takes."""

    __slots__ = (
        "_constraints",
        "_estimator",
        "_host",
        "_kv",
        "_limits",
        "_make_shared",
        "_policy",
        "_pool",
        "_preemption",
        "_requests",
        "_siblings",
        "_states",
        "_stats",
    )

    def __init__(
        self,
        requests: Requests,
        policy: SchedulePolicy,
        preemption: Preemption,
        limits: StepLimits,
        *,
        states: RowStates,
        pool: ReqToTokenPool,
        kv: KVMemory,
        host: HostMemory,
        siblings: Siblings,
        estimator: OutputEstimator,
        constraints: Sequence[Constraint],
        make_shared: Callable[[], SharedPrefixes],
        stats: SchedulerStats,
    ) -> None:
        """Compose; `make_shared` makes what remembers, for one pass, which prefixes are being computed."""
        self._requests = requests
        self._policy = policy
        self._preemption = preemption
        self._limits = limits
        self._states = states
        self._pool = pool
        self._kv = kv
        self._host = host
        self._siblings = siblings
        self._estimator = estimator
        self._constraints = constraints
        self._make_shared = make_shared
        self._stats = stats

    def skip(self, record: PassRecord, reason: Reason) -> list[Chunk]:
        """No prompt is computed in this pass: one verdict for all."""
        self._count_waiting(record)
        record.end(reason)
        return []

    def plan(self, record: PassRecord, num_decodes: int, now_s: float) -> list[Chunk]:
        """Continue the prompts in progress, then admit waiting requests; gives those admitted rows and pages."""
        requests = self._requests
        self._count_waiting(record)
        if not (record.num_waiting or requests.partial):
            return []
        adder = self._adder(num_decodes)
        record.budget_before = adder.budget.state()
        for req in requests.partial:
            record.continued.append(adder.continue_chunk(req, int(self._states.num_computed[req.row])))
        reason = Reason.RETRACTING if record.retractions else self._policy.hold(requests.waiting, now_s)
        if reason is None:
            self._admit(adder, record)
        else:
            record.end(reason)
        _replace(record, adder.use_leftover())
        record.budget_after = adder.budget.state()
        record.cache_misses = self._kv.take_misses()
        for chunk in adder.chunks:
            self._start(chunk, now_s)
        self._preemption.put_back(now_s)
        self._note_overtaken(adder.chunks)
        return adder.chunks

    def _count_waiting(self, record: PassRecord) -> None:
        record.num_waiting = self._requests.num_waiting
        record.num_grammar = len(self._requests.grammar)

    # ------------------------------------------------------------ whom to admit

    def _admit(self, adder: PrefillAdder, record: PassRecord) -> None:
        """Offer the waiting requests until a budget is spent: first those on the host, then in the policy's order.

        A request that lacks memory does not block those behind it: up to `look_ahead` of them are tried. Whoever was
        overtaken `MAX_OVERTAKEN` times is overtaken no more, so its turn comes when enough of the running have ended.
        Nobody overtakes a request whose KV is on the host: it has been running already.
        """
        shared = self._make_shared()
        for req in self._still_computing():
            shared.computing(req, int(self._states.num_settled[req.row]))
        refused = ""
        num_ahead = num_admitted = num_skipped = 0
        look_ahead = self._limits.look_ahead if self._policy.looks_ahead else -1
        most = self._policy.max_admissions(self._requests.waiting)
        for req in self._candidates(record.now_s):
            spent = adder.exhausted(may_preempt=self._policy.preempts)
            if most is not None and num_admitted >= most:
                spent = self._policy.full_reason
            elif spent is None and (num_ahead > look_ahead >= 0 or num_skipped > _MAX_SKIPPED):
                spent = Reason.LOOK_AHEAD_SPENT
            if spent is not None:
                record.end(spent, behind=refused)
                return
            verdict = self._offer(req, adder, shared, record)
            record.verdicts.append(verdict)
            match verdict.result:
                case AddReqResult.CONTINUE:
                    num_admitted += 1
                    if req.status is ReqStatus.SWAPPED:
                        self._host.promise_in()
                    for constraint in self._constraints:
                        constraint.admitted(req)
                    shared.computing(req, adder.chunks[-1].start)
                case AddReqResult.SKIP:
                    num_skipped += 1
                case AddReqResult.OTHER:
                    record.end(Reason.NO_ROW if verdict.reason is Reason.NO_ROW else Reason.BEHIND, req.rid)
                    return
                case AddReqResult.NO_TOKEN:
                    swapped = req.status is ReqStatus.SWAPPED
                    if look_ahead < 0 or swapped or req.num_overtaken >= MAX_OVERTAKEN:
                        record.end(Reason.OVERTAKEN_AHEAD if look_ahead >= 0 else Reason.BEHIND, req.rid)
                        return
                    refused = refused or req.rid
            num_ahead += bool(refused)

    def _candidates(self, now_s: float) -> Iterator[Req]:
        yield from self._requests.swapped
        yield from self._policy.order(self._requests.waiting, now_s)

    def _offer(self, req: Req, adder: PrefillAdder, shared: SharedPrefixes, record: PassRecord) -> Verdict:
        """One candidate: rules that concern it alone, then memory and computing, then whether others make place."""
        sibling = self._siblings.source(req)
        prefix = self._kv.prefix(req, sibling)
        skip = AddReqResult.SKIP
        if req.status is ReqStatus.SWAPPED:
            if self._host.has_outs:  # never in and out in the same step
                return Verdict(req.rid, skip, Reason.RETRACTING, prefix.ready_len)
        elif req.group and not sibling and self._sibling_prefills(req, adder.chunks):
            return Verdict(req.rid, skip, Reason.SIBLING_PREFILLS, prefix.ready_len)
        elif prefix.ready_len + 1 < req.fill_len and shared.is_coming(req, prefix.ready_len):
            return Verdict(req.rid, skip, Reason.PREFIX_COMING, prefix.ready_len)
        refusal = first_refusal(self._constraints, req)
        if refusal is not None:
            return refusal
        if not adder.has_row:
            if not self._preempt(req, prefix, adder, record):
                return Verdict(req.rid, AddReqResult.OTHER, Reason.NO_ROW, prefix.ready_len)
            prefix = self._kv.prefix(req, self._siblings.source(req))  # whoever left has changed the cache
        verdict = adder.add(req, prefix)
        if verdict.result is AddReqResult.NO_TOKEN and self._preempt(req, prefix, adder, record):
            verdict = adder.add(req, self._kv.prefix(req, self._siblings.source(req)))
        return verdict

    def _sibling_prefills(self, req: Req, chunks: list[Chunk]) -> bool:
        """Whether waiting for a sibling's prompt saves computing it: one step, against a prompt."""
        if not self._kv.shares_prefixes or req.sampling.prompt_logprobs is not None:
            return False
        starts = any(chunk.is_first and chunk.req.group == req.group for chunk in chunks)
        return starts or self._siblings.is_coming(req)

    def _still_computing(self) -> list[Req]:
        """Requests with a row whose prompt no settled step has finished."""
        states, running = self._states, self._requests.running
        unsettled = states.num_settled[running.rows] < states.fill_len[running.rows]
        return self._requests.partial + [running.reqs[idx] for idx in np.flatnonzero(unsettled)]

    def _preempt(self, req: Req, prefix: Prefix, adder: PrefillAdder, record: PassRecord) -> bool:
        """Take the places of less urgent requests if that lets this one start; True if it did."""
        if not self._policy.preempts or not adder.can_compute(req, prefix):
            return False
        victims = self._preemption.victims_for(
            req, adder.missing_tokens(req, prefix), self._kept_for, self._policy.may_displace
        )
        if not victims:
            return False
        pages_before, kept_tokens = self._kv.available_pages, sum(map(self._kept_for, victims))
        if req.status is ReqStatus.SWAPPED:
            self._host.promise_in()  # so that nobody is swapped out for it
        for victim in victims:
            self._preemption.take_place(victim, "priority", record)
        freed_tokens = (self._kv.available_pages - pages_before) * self._kv.page_size
        adder.make_room(freed_tokens, kept_tokens, len(victims))
        return True

    def _kept_for(self, req: Req) -> int:
        rows = np.array([req.row], dtype=np.int32)
        return int(self._expected_output(rows))

    # ------------------------------------------------------------ starting them

    def _start(self, chunk: Chunk, now_s: float) -> None:
        """Give a chunk its row and pages, and the request its new status."""
        req = chunk.req
        if chunk.is_first:
            sibling = self._siblings.source(req)
            self._note_start(req, chunk, now_s)
            req.row = self._pool.allocate()
            self._states.open(req, chunk.start)
            self._kv.open_row(req)
            self._requests.start(req, now_s)
            self._kv.grow(req.row, chunk.start + chunk.length)
            self._kv.restore(req, chunk.start, sibling)
        else:
            self._kv.grow(req.row, chunk.start + chunk.length)
        if chunk.is_last:
            self._requests.begin_decode(req, now_s)

    def _note_start(self, req: Req, chunk: Chunk, now_s: float) -> None:
        if req.status is not ReqStatus.WAITING:
            return
        req.queue_s = now_s - req.received_s
        req.cached_tokens = chunk.start
        self._stats.prompt_tokens += req.prompt_len
        self._stats.cached_tokens += chunk.start

    # ------------------------------------------------------------ sums

    def _adder(self, num_decodes: int) -> PrefillAdder:
        requests, limits, page_size = self._requests, self._limits, self._kv.page_size
        budget = PrefillBudget(
            page_size=page_size,
            available_tokens=self._kv.available_pages * page_size,
            expected_tokens=self._expected(),
            max_prefill_tokens=limits.max_prefill_tokens,
            chunk_size=limits.chunk_size,
            num_decodes=num_decodes,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            decodes_first=limits.decodes_first,
        )
        return PrefillAdder(
            self._kv,
            budget,
            num_free_rows=self._pool.num_free_rows,
            nothing_runs=not requests.num_with_row,
            estimator=self._estimator,
            partial_prefills=PartialPrefills(
                limits.partial,
                page_size=page_size,
                step_tokens=budget.rem_step_tokens,
                num_prompts=len(requests.partial) + len(requests.waiting),
            ),
            num_lookahead_tokens=limits.num_lookahead_tokens,
        )

    def _expected(self) -> float:
        """Tokens that those with a row will still add: the rest of the prompts, surely, and the outputs, probably."""
        states, partial = self._states, self._requests.partial
        rows = self._requests.running.rows
        if not partial:
            return self._expected_output(rows)
        partial_rows = np.array([req.row for req in partial], dtype=np.int32)
        remaining = states.fill_len[partial_rows] - states.num_computed[partial_rows]
        rest = promised_tokens(remaining, self._kv.page_size)
        return rest + self._expected_output(np.concatenate([rows, partial_rows]))

    def _expected_output(self, rows: IntArray) -> float:
        states = self._states
        max_new = states.max_kv_len[rows] - states.prompt_len[rows] + np.int32(1)
        generated = states.known_len[rows] - states.prompt_len[rows]
        # of a prompt in progress, all of which is promised already, only what comes behind it
        to_come = states.max_kv_len[rows] - np.maximum(states.num_computed[rows], states.fill_len[rows])
        return self._estimator.expected(to_come, generated, max_new, states.ignore_eos[rows])

    def _note_overtaken(self, chunks: list[Chunk]) -> None:
        newest = max((chunk.req.seq for chunk in chunks if chunk.is_first), default=0)
        for num_seen, req in enumerate(self._requests.waiting):
            if req.seq > newest or num_seen >= _MAX_AGED:
                break
            req.num_overtaken += 1


def _replace(record: PassRecord, changed: list[Verdict]) -> None:
    """Put verdicts in the place of those that the same requests have in a record."""
    for verdict in changed:
        for verdicts in (record.continued, record.verdicts):
            for idx, each in enumerate(verdicts):
                if each.rid == verdict.rid:
                    verdicts[idx] = verdict
