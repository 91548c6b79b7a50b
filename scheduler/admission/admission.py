"""`Admission`: the prefill half of a pass: which prompts are computed in this step, and how many of their tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain, islice

from ..arrays import IntArray
from ..estimator import OutputEstimator
from ..media.tile_budget import TileBudget
from ..pass_state import PassState
from ..policy.base import SchedulePolicy
from ..records.stats import SchedulerStats
from ..records.verdict import Reason, Verdict
from ..requests.req import Chunk, Req, ReqStatus
from ..step_size.background_share import NO_RESERVE, Reserve
from ..step_size.step_limits import PartialPrefills, StepCaps, StepLimits
from ..step_size.step_target import PromptTime, StepTarget
from .admission_pass import AdmissionParts, AdmissionPass
from .budget import PrefillBudget
from .prefill_adder import PrefillAdder
from .shared_prefixes import PrefixDedup

_MAX_AGED = 256
"""Ageing considers this many of the longest waiting requests per pass, and the next ones when those have started."""

_MAX_COUNTED = 32
"""Waiting prompts that each pass adds up; with this many, steps already have their maximum length."""


class Admission:
    """Continues the partial prefills, lets an `AdmissionPass` admit waiting requests, and gives rows and pages."""

    def __init__(
        self,
        parts: AdmissionParts,
        background: SchedulePolicy,
        limits: StepLimits,
        *,
        caps: StepCaps,
        target: StepTarget,
        estimator: OutputEstimator,
        dedups_prefixes: bool,
        stats: SchedulerStats,
    ) -> None:
        """Compose.

        Args:
            parts: for interactive requests.
            background: the order of those of the background.
            dedups_prefixes: requests wait for a prefix that another one computes, see `PrefixDedup`.
        """
        self._parts, self._memory = parts, parts.memory
        self._background = replace(
            parts, queue=parts.requests.background, swapped=(), policy=background, look_ahead=0
        )
        self._limits = limits
        self._caps = caps
        self._target = target
        self._estimator = estimator
        self._dedups_prefixes = dedups_prefixes
        self._stats = stats

    def skip(self, state: PassState, reason: Reason) -> list[Chunk]:
        """No prompt is computed in this pass: one verdict for all."""
        self._count_waiting(state)
        state.refuse_rest(reason)
        return []

    def plan(self, state: PassState, decode_rows: IntArray) -> list[Chunk]:
        """Continue the partial prefills, then admit waiting requests; admitted requests get rows and pages.

        Those of the background class are left to `plan_background`.

        Args:
            decode_rows: rows of the requests that decode in the same step.
        """
        parts, requests = self._parts, self._parts.requests
        self._count_waiting(state)
        partial = requests.partial
        if requests.num_background:
            partial = [req for req in partial if not req.background]
        if not (partial or parts.queue or parts.swapped or requests.grammar):
            return []
        num_decodes = len(decode_rows)
        kv_tokens = int(self._memory.states.num_computed[decode_rows].sum()) + num_decodes
        is_limited = self._target.limits_beside(num_decodes)
        time = self._target.for_prompts(
            num_decodes,
            kv_tokens,
            *(self._waiting_work(partial) if is_limited else (0, 0)),
            self._memory.kv.page_size,
            num_with_images=self._num_with_images() if parts.encoder_cache.num_blocks else 0,
        )
        return self._plan(parts, state, partial, num_decodes, time)

    def plan_background(
        self, state: PassState, num_beside: int, time: PromptTime, reserve: Reserve
    ) -> list[Chunk]:
        """As `plan`, for the background; no request is admitted while an interactive one waits for a row or memory.

        Args:
            num_beside: tokens that the step computes already.
            time: for these prompts.
            reserve: rows and pages that stay free.
        """
        parts, requests = self._background, self._parts.requests
        partial = [req for req in requests.partial if req.background]
        if not (partial or parts.queue):
            return []
        return self._plan(parts, state, partial, num_beside, time, reserve)

    def _plan(
        self,
        parts: AdmissionParts,
        state: PassState,
        partial: list[Req],
        num_beside: int,
        time: PromptTime,
        reserve: Reserve = NO_RESERVE,
    ) -> list[Chunk]:
        is_first = state.budget_before is None
        if is_first:  # a later class adds to the tiles of the first one
            parts.encoder_cache.planned = {}
        adder = self._adder(parts, len(partial), num_beside, time, reserve)
        if is_first:
            state.budget_before = adder.budget.state()
        for req in partial:
            state.continued.append(adder.continue_chunk(req, int(self._memory.states.num_computed[req.row])))
        sources: dict[Req, Req] = {}
        if state.rest_reason is None:
            # Requests that were retracted in this pass have no verdict, so there may be a reason and no rest.
            reason = self._reason_to_hold(parts, state)
            if reason is not None:
                state.refuse_rest(reason)
        else:
            reason = state.rest_reason
        if reason is None:
            dedup = PrefixDedup(self._memory.kv.page_size) if self._dedups_prefixes else None
            admission_pass = AdmissionPass(parts, adder, dedup, state)
            admission_pass.walk()
            sources = admission_pass.sources
            if admission_pass.refused and state.rest_reason is None:
                state.refuse_rest(Reason.BACKGROUND, admission_pass.refused)
        _replace(state, adder.use_leftover())
        if is_first:
            state.budget_after = adder.budget.state()
            state.step_time = self._target.explain(adder.budget.time)
        state.cache_misses += self._memory.kv.take_misses()
        for chunk in adder.chunks:
            self._start(chunk, sources.get(chunk.req), state.now_s)
        parts.preemption.requeue(state.now_s)
        if not parts.is_background:
            self._note_overtaken(adder.chunks)
        return adder.chunks

    def _reason_to_hold(self, parts: AdmissionParts, state: PassState) -> Reason | None:
        """Reason why no waiting request is offered in this pass; None if some may be."""
        if parts.pauses.lets_run:
            return Reason.PAUSED
        # Interactive requests lack nothing when one of the background was retracted for them.
        if any(parts.is_background or each.cause != "background" for each in state.retractions):
            return Reason.RETRACTING
        return parts.policy.hold(parts.queue, state.now_s) if parts.queue or parts.swapped else None

    def _count_waiting(self, state: PassState) -> None:
        state.num_waiting = self._parts.requests.num_waiting
        state.num_grammar = len(self._parts.requests.grammar)

    def _adder(
        self, parts: AdmissionParts, num_partial: int, num_beside: int, time: PromptTime, reserve: Reserve
    ) -> PrefillAdder:
        requests, page_size = parts.requests, self._memory.kv.page_size
        limits = self._limits.capped(self._caps.max_step_tokens)
        num_running = requests.num_with_row
        num_free_rows = self._num_free_rows
        if parts.is_background:  # without other requests one may always start
            num_free_rows = max(num_free_rows - reserve.rows, 0 if num_running else min(1, num_free_rows))
        budget = PrefillBudget(
            page_size=page_size,
            available_tokens=self._memory.kv.available_pages * page_size,
            expected_tokens=parts.reservations.total_tokens() + reserve.pages * page_size,
            max_prefill_tokens=limits.max_prefill_tokens,
            chunk_size=limits.chunk_size,
            num_decodes=num_beside,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            decodes_first=limits.decodes_first,
            time=time,
        )
        return PrefillAdder(
            self._memory.kv,
            budget,
            num_free_rows=num_free_rows,
            num_running=num_running,
            estimator=self._estimator,
            partial_prefills=PartialPrefills(
                limits.partial,
                page_size=page_size,
                step_tokens=min(budget.rem_step_tokens, time.most_tokens(0)),
                num_prompts=num_partial + len(parts.queue),
            ),
            tiles=TileBudget(parts.encoder_cache, time, page_size),
            num_lookahead_tokens=limits.num_lookahead_tokens,
        )

    def _waiting_work(self, partial: list[Req]) -> tuple[int, int]:
        """Prompt tokens to be computed, without those that are known to be cached; and the same without the longest.

        Of the waiting prompts the first `_MAX_COUNTED` count, and only as many as there are free rows. What requests of
        one call share is computed once, and its questions, or parallel samples, are one prompt.
        """
        requests, states, kv = self._parts.requests, self._memory.states, self._memory.kv
        lengths: Counter[int | str] = Counter()
        for req in partial:
            lengths[req.call] += req.fill_len - int(states.num_computed[req.row])
        waiting = list(islice(requests.waiting, min(_MAX_COUNTED, max(0, self._num_free_rows))))
        for req, match in zip(waiting, kv.known_matches(waiting), strict=True):
            is_shared = req.call in lengths and kv.shares_prefixes
            shared = min(req.shared_len or req.prompt_len, req.most_cached) if is_shared else 0
            lengths[req.call] += req.fill_len - max(match.num_pages * kv.page_size, shared)
        total = lengths.total()
        return total, total - max(lengths.values(), default=0)

    def _num_with_images(self) -> int:
        """Partial and waiting prompts with images, of the first `_MAX_COUNTED`."""
        requests = self._parts.requests
        first = islice(chain(requests.partial, requests.waiting), _MAX_COUNTED)
        return sum(req.images is not None for req in first)

    @property
    def _num_free_rows(self) -> int:
        """Negative while more requests run than a cap allows: then a preempted request frees no row for another."""
        free = self._memory.pool.num_free_rows
        if self._caps.max_running is None:
            return free
        return min(free, self._caps.max_running - self._parts.requests.num_with_row)

    def _start(self, chunk: Chunk, sibling: Req | None, now_s: float) -> None:
        """Give a chunk its row and pages, and the request its new status."""
        req, requests, memory = chunk.req, self._parts.requests, self._memory
        if chunk.is_first:
            self._note_start(req, chunk, now_s)
            req.row = memory.pool.allocate()
            memory.states.open(req, chunk.start)
            memory.kv.open_row(req)
            requests.start(req, now_s)
            memory.kv.grow(req.row, chunk.start + chunk.length)
            memory.kv.restore(req, chunk.start, sibling)
        else:
            memory.kv.grow(req.row, chunk.start + chunk.length)
        if chunk.is_last:
            requests.begin_decode(req, now_s)

    def _note_start(self, req: Req, chunk: Chunk, now_s: float) -> None:
        if req.status is not ReqStatus.WAITING:
            return
        req.queue_s = now_s - req.received_s
        req.cached_tokens = chunk.start
        self._stats.prompt_tokens += req.prompt_len
        self._stats.cached_tokens += chunk.start
        host_tokens = min(req.host_tokens, chunk.start)
        self._stats.prompt_host_tokens += host_tokens
        self._stats.prompt_tier_tokens += min(req.loaded_tokens, chunk.start - host_tokens)

    def _note_overtaken(self, chunks: list[Chunk]) -> None:
        newest = max((chunk.req.seq for chunk in chunks if chunk.is_first), default=0)
        for num_seen, req in enumerate(self._parts.requests.waiting):
            if req.seq > newest or num_seen >= _MAX_AGED:
                break
            req.num_overtaken += 1


def _replace(state: PassState, changed: list[Verdict]) -> None:
    """Replace the verdicts of the requests in `changed`."""
    for verdict in changed:
        for verdicts in (state.continued, state.verdicts):
            for idx, each in enumerate(verdicts):
                if each.rid == verdict.rid:
                    verdicts[idx] = verdict
