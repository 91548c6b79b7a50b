"""`AdmissionPass`: one walk over the waiting requests; each considered request gets a verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cmp_to_key
from itertools import chain

import numpy as np

from ..adapters.adapter_slots import AdapterSlots
from ..media.encoder_cache import EncoderCache
from ..memory.kv_memory import RowMemory
from ..pass_state import PassState
from ..pause import Pauses
from ..policy.base import SchedulePolicy
from ..preemption.preemption import Cause, Preemption
from ..prefix_cache.base import Prefix
from ..records.verdict import AddReqResult, Reason, Verdict
from ..requests.req import MAX_OVERTAKEN, Req, ReqStatus
from ..requests.requests import Requests, WaitingQueue
from .budget import Reservations
from .prefill_adder import PrefillAdder
from .shared_prefixes import ParallelSamples, PrefixDedup

_MAX_SKIPPED = 256
"""Requests that a pass may skip because of rules for single requests; it bounds the cost of a pass."""


@dataclass(frozen=True, slots=True)
class AdmissionParts:
    """Parts that every walk needs; `look_ahead`: see `StepLimits`.

    Attributes:
        queue, swapped, policy: the waiting requests of the class that is walked over, and their order.
    """

    requests: Requests
    queue: WaitingQueue
    swapped: Sequence[Req]
    policy: SchedulePolicy
    preemption: Preemption
    pauses: Pauses
    reservations: Reservations
    parallel_samples: ParallelSamples
    adapter_slots: AdapterSlots
    encoder_cache: EncoderCache
    memory: RowMemory
    look_ahead: int

    @property
    def is_background(self) -> bool:
        """Whether the walk is over requests of the background."""
        return self.queue is self.requests.background


class AdmissionPass:
    """See the module. Made anew for each pass.

    Attributes:
        sources: request that starts from a copy of a sibling's last page -> that sibling. A source is not preempted
            in this pass.
        refused: rid of the first request that lacked memory; "" if none did.
    """

    __slots__ = (
        "_adder",
        "_has_background",
        "_look_ahead",
        "_lowest_running",
        "_memory",
        "_parts",
        "_prefix_dedup",
        "_state",
        "refused",
        "sources",
    )

    def __init__(
        self, parts: AdmissionParts, adder: PrefillAdder, dedup: PrefixDedup | None, state: PassState
    ) -> None:
        """`dedup`: empty; the constructor adds the prefixes that running requests compute. None: none is shared."""
        self._parts, self._memory = parts, parts.memory
        self._adder = adder
        self._prefix_dedup = dedup
        self._state = state
        self._look_ahead = parts.look_ahead if parts.policy.looks_ahead else -1
        self._lowest_running: int | None = None  # priority; None: not looked up since the last retraction
        self._has_background = not parts.is_background and bool(parts.requests.background_with_row)
        self.sources: dict[Req, Req] = {}
        self.refused = ""
        if dedup is not None:
            for req in self._still_computing():
                dedup.computing(req, int(self._memory.states.num_settled[req.row]))

    def walk(self) -> None:
        """Offer the waiting requests until a budget is spent: first those on the host, then in the policy's order.

        A request that lacks memory does not block the later ones: up to `look_ahead` of them are tried. After
        `MAX_OVERTAKEN` passes a request blocks admission of later ones, so it starts when enough running requests have
        ended. A swapped request that lacks memory always blocks: it was running before.
        """
        adder, state, policy = self._adder, self._state, self._parts.policy
        num_ahead = num_skipped = 0
        most = policy.max_offers(self._parts.queue)
        for num_offered, req in enumerate(self._candidates()):
            spent = adder.exhausted(may_preempt=policy.preempts or self._has_background)
            if most is not None and num_offered >= most:
                spent = policy.full_reason
            elif spent is None and (num_ahead > self._look_ahead >= 0 or num_skipped > _MAX_SKIPPED):
                spent = Reason.LOOK_AHEAD_SPENT
            if spent is not None:
                if self._parts.is_background:  # the next one keeps its prefix, see `KVMemory.enqueued`
                    self._memory.kv.match(req)
                state.refuse_rest(spent, at=self.refused)
                return
            verdict = self._offer(req)
            state.verdicts.append(verdict)
            match verdict.result:
                case AddReqResult.CONTINUE:
                    self._admitted(req)
                case AddReqResult.SKIP:
                    num_skipped += 1
                case AddReqResult.OTHER:
                    no_row = verdict.reason is Reason.NO_ROW
                    state.refuse_rest(Reason.NO_ROW if no_row else Reason.BEHIND, req.rid)
                    return
                case AddReqResult.NO_TOKEN:
                    if (reason := self._reason_to_stop_at(req)) is not None:
                        state.refuse_rest(reason, req.rid)
                        return
                    self.refused = self.refused or req.rid
            num_ahead += bool(self.refused)

    def _candidates(self) -> Iterator[Req]:
        """Swapped requests first, except after a waiting request that is urgent enough to preempt them."""
        parts = self._parts
        waiting = parts.policy.order(parts.queue, self._state.now_s)
        if not (parts.policy.preempts and parts.swapped):
            return chain(parts.swapped, waiting)
        return _merged(parts.swapped, iter(waiting), parts.policy.may_displace)

    def _reason_to_stop_at(self, req: Req) -> Reason | None:
        """Reason why no request after one that lacks memory may be tried; None if later ones may."""
        if self._look_ahead < 0:
            return Reason.BEHIND
        waited_enough = req.num_overtaken >= MAX_OVERTAKEN or req.status is ReqStatus.SWAPPED
        return Reason.OVERTAKEN_AHEAD if waited_enough else None

    def _admitted(self, req: Req) -> None:
        self._parts.adapter_slots.admitted(req)
        self._parts.encoder_cache.admitted(req, self._adder.chunks[-1].start)
        if self._prefix_dedup is not None:
            self._prefix_dedup.computing(req, self._adder.chunks[-1].start)

    # ------------------------------------------------------------ one candidate

    def _offer(self, req: Req) -> Verdict:
        """Test the rules for single requests, then memory and the step's budget, then preemption."""
        adder = self._adder
        verdict = self._parts.adapter_slots.refusal(req)
        if verdict is not None:
            self._take_from_background(req, verdict.reason)
            return verdict
        sibling = self._parts.parallel_samples.source(req)
        prefix = self._memory.kv.prefix(req, sibling)
        verdict = self._rule_against(req, prefix, sibling)
        if verdict is not None:
            self._take_from_background(req, verdict.reason)
            return verdict
        if not adder.has_row:
            if not self._preempt(req, prefix, sibling):
                return Verdict(req.rid, AddReqResult.OTHER, Reason.NO_ROW, prefix.ready_len)
            prefix = self._memory.kv.prefix(req, sibling)  # the retraction has changed the cache
        verdict = adder.add(req, prefix)
        if verdict.result is AddReqResult.NO_TOKEN and self._preempt(req, prefix, sibling):
            prefix = self._memory.kv.prefix(req, sibling)
            verdict = adder.add(req, prefix)
        if verdict.result is AddReqResult.CONTINUE and sibling is not None:
            self.sources[req] = sibling
        return verdict

    def _rule_against(self, req: Req, prefix: Prefix, sibling: Req | None) -> Verdict | None:
        """Reason why a request waits although there may be memory for it; None if it need not."""
        reason = None
        if not self._memory.host.may_copy_in(prefix.num_host_pages):
            reason = Reason.COPY_BUDGET
        elif req.host_pages is not None:
            if self._memory.host.is_leaving(req.host_pages):  # it was swapped out in this pass
                reason = Reason.RETRACTING
        elif req.group and sibling is None and self._sibling_prefills(req):
            reason = Reason.SIBLING_PREFILLS
        elif self._waits_for_prefix(req, prefix):
            reason = Reason.PREFIX_COMING
        if reason is None:
            return self._parts.encoder_cache.refusal(req, prefix.ready_len)
        return Verdict(req.rid, AddReqResult.SKIP, reason, prefix.ready_len)

    def _waits_for_prefix(self, req: Req, prefix: Prefix) -> bool:
        dedup = self._prefix_dedup
        if dedup is None or req.needs_all_tokens or prefix.ready_len + 1 >= req.fill_len:
            return False
        return dedup.is_pending(req, prefix.ready_len)

    def _sibling_prefills(self, req: Req) -> bool:
        """Whether a sibling computes the same prompt: waiting costs one step and saves computing the prompt again."""
        if not self._memory.kv.shares_prefixes or req.needs_all_tokens:
            return False
        starts = any(chunk.is_first and chunk.req.group == req.group for chunk in self._adder.chunks)
        return starts or self._parts.parallel_samples.prompt_is_pending(req)

    def _still_computing(self) -> list[Req]:
        """Requests with a row and a prompt that is not complete in the settled steps.

        For an interactive request no prefix of the background counts: it may not be computed for long.
        """
        states, running = self._memory.states, self._parts.requests.running
        unsettled = states.num_settled[running.rows] < states.fill_len[running.rows]
        computing = self._parts.requests.partial + [running.reqs[idx] for idx in np.flatnonzero(unsettled)]
        if not self._has_background:
            return computing
        return [req for req in computing if not req.background]

    def _preempt(self, req: Req, prefix: Prefix, sibling: Req | None) -> bool:
        """Retract requests of the background, and preempt less urgent ones, if that lets this one start."""
        parts, adder = self._parts, self._adder
        outranks = parts.policy.preempts and self._outranks_somebody(req)
        if not (self._has_background or outranks) or not adder.can_compute(req, prefix):
            return False
        victims: list[Req] = []
        lack_tokens = adder.missing_tokens(req, prefix)
        if self._has_background:
            victims, freed_tokens = parts.preemption.background_for(lack_tokens, parts.reservations.tokens_of)
            lack_tokens -= freed_tokens
        if not victims or lack_tokens > 0:
            protected = {sibling, *self.sources.values()}
            urgent_over = (
                parts.preemption.victims_for(
                    req,
                    lack_tokens,
                    parts.reservations.tokens_of,
                    lambda urgent, victim: (
                        victim not in protected and parts.policy.may_displace(urgent, victim)
                    ),
                )
                if outranks
                else []
            )
            if not (urgent_over or (victims and adder.could_be_alone(len(victims)))):
                return False
            victims = victims + urgent_over
        self._retract(victims)
        return True

    def _take_from_background(self, req: Req, reason: Reason) -> None:
        """Retract requests of the background that have the adapter slot or encoder rows that a request lacks.

        Both come free at the end of the pass, so the request starts in the next one; a pass does this once.
        """
        if not self._has_background or self._state.num_retractions:
            return
        background = self._parts.requests.background_with_row
        if reason is Reason.LORA_LIMIT:
            self._retract(self._parts.adapter_slots.to_free_one(req, background))
        elif reason is Reason.MEDIA_LIMIT:
            self._retract([each for each in background if self._parts.encoder_cache.has_rows(each)])

    def _retract(self, victims: list[Req]) -> None:
        """Take the rows and pages of some requests, for the next candidates."""
        parts, memory = self._parts, self._memory
        pages_before = memory.kv.available_pages
        reserved_tokens = sum(map(parts.reservations.tokens_of, victims))
        for victim in victims:
            cause: Cause = "background" if victim.background else "priority"
            self._state.add_retraction(parts.preemption.retract(victim, cause))
        freed_tokens = (memory.kv.available_pages - pages_before) * memory.kv.page_size
        self._adder.add_capacity(freed_tokens, reserved_tokens, len(victims))
        self._lowest_running = None
        self._has_background = self._has_background and bool(parts.requests.background_with_row)

    def _outranks_somebody(self, req: Req) -> bool:
        """A cheap test before the search for victims: many requests lack memory, and few of them are urgent."""
        if self._lowest_running is None:
            self._lowest_running = self._parts.preemption.lowest_priority()
        return self._parts.preemption.outranks(req, self._lowest_running)


def _merged(
    swapped: Sequence[Req], waiting: Iterator[Req], goes_before: Callable[[Req, Req], bool]
) -> Iterator[Req]:
    """Merge two orders: each swapped request comes after the waiting requests that go before it."""

    def compare(one: Req, other: Req) -> int:
        return -1 if goes_before(one, other) else 1 if goes_before(other, one) else one.seq - other.seq

    ahead = next(waiting, None)
    for req in sorted(swapped, key=cmp_to_key(compare)):
        while ahead is not None and goes_before(ahead, req):
            yield ahead
            ahead = next(waiting, None)
        yield req
    while ahead is not None:
        yield ahead
        ahead = next(waiting, None)
