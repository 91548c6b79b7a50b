"""`Decodes`: the decode half of a pass: which running requests generate a token in this step, each with a page for it.

Pages come from eviction, then from retraction: this module chooses the victims, `preemption.py` retracts them.

With n pipeline stages, `MicroBatches` divides the running requests among the steps in flight, so that all stages have
work.
"""

from __future__ import annotations

import itertools
import logging

import numpy as np

from ..runtime.messages import Finish, FinishKind
from .arrays import EMPTY, IntArray
from .estimator import OutputEstimator
from .memory.kv_memory import RowMemory
from .memory.pages import IncomingPages
from .pass_state import PassState
from .policy.base import SchedulePolicy
from .preemption.chaos import ChaosRetract
from .preemption.preemption import Preemption
from .requests.outputs import Answers
from .requests.req import Req
from .requests.requests import Requests
from .requests.row_states import RowStates

logger = logging.getLogger(__name__)


class MicroBatches:
    """Chooses the decodes of a step when several steps are in flight.

    With n stages a step may have one n-th of the running requests, and none with a last token that is not settled. A
    step that ends makes its requests ready again, so n steps with about equal parts follow each other. A request that
    is left over because more are ready is in the next step: those that waited longest are taken first.
    """

    def __init__(self, states: RowStates, num_stages: int) -> None:
        """Take the number of stages, 2 or more."""
        self._states = states
        self._num_stages = num_stages
        self._num_chosen = 0
        self._turn_of_row = np.zeros(len(states.known_len), dtype=np.int64)  # when it was chosen last

    def choose(self, rows: IntArray, reqs: list[Req], num_running: int) -> tuple[IntArray, list[Req]]:
        """Choose the requests that decode in this step, in the same order.

        Args:
            rows: [B] of the requests that have a token to compute, or will have when their last one is settled.
            reqs: [B] the same requests.
            num_running: B and the requests with their last token in flight.
        """
        states, most = self._states, -(-num_running // self._num_stages)
        ready = np.flatnonzero(states.num_computed[rows] < states.known_len[rows])
        if len(ready) > most:
            longest = np.argsort(self._turn_of_row[rows[ready]], kind="stable")[:most]
            ready = ready[np.sort(longest)]
        self._num_chosen += 1
        self._turn_of_row[rows[ready]] = self._num_chosen
        return rows[ready], [reqs[idx] for idx in ready.tolist()]


class Decodes:
    """Finds a page for the next token of each running request; retracts requests when there are too few pages."""

    def __init__(
        self,
        requests: Requests,
        preemption: Preemption,
        *,
        memory: RowMemory,
        incoming: IncomingPages,
        estimator: OutputEstimator,
        chaos: ChaosRetract,
        answers: Answers,
        policy: SchedulePolicy,
        num_stages: int = 1,
    ) -> None:
        """Take the parts.

        Args:
            policy: its `by_priority` says whether requests of the lowest priority are retracted first.
            num_stages: pipeline stages of the runner.
        """
        self._micro_batches = MicroBatches(memory.states, num_stages) if num_stages > 1 else None
        self._requests = requests
        self._preemption = preemption
        self._states, self._kv, self._incoming = memory.states, memory.kv, incoming
        self._estimator = estimator
        self._chaos = chaos
        self._answers = answers
        self._policy = policy

    def plan(self, state: PassState) -> tuple[IntArray, list[Req]]:
        """([B] rows, [B] requests) that decode in this step. Each has a page for its next token.

        Those of the background class are left to `plan_background`.
        """
        self._cause_chaos(state)
        running = self._requests.running
        if not running:
            return EMPTY, []
        if not self._requests.num_background:
            return self._with_pages(running.rows, running.reqs, self._requests.partial, state)
        rows, reqs = _of_class(running.rows, running.reqs, self._states, is_background=False)
        return self._with_pages(
            rows, reqs, [req for req in self._requests.partial if not req.background], state
        )

    def background(self) -> tuple[IntArray, list[Req]]:
        """([B] rows, [B] requests) of the background that could decode in this step."""
        running = self._requests.running
        return _of_class(running.rows, running.reqs, self._states, is_background=True)

    def plan_background(
        self, rows: IntArray, reqs: list[Req], state: PassState
    ) -> tuple[IntArray, list[Req]]:
        """As `plan`, for some of the requests of the background. They take pages from none but each other.

        Args:
            rows, reqs: [B] of `background`, in any order.
        """
        chosen = set(reqs)
        others = [req for req in self._requests.background_with_row if req not in chosen]
        return self._with_pages(rows, reqs, others, state)

    def _with_pages(
        self, rows: IntArray, reqs: list[Req], others: list[Req], state: PassState
    ) -> tuple[IntArray, list[Req]]:
        """The decodes of this step among [B] requests, each with a page; `others`: of their class, with a row."""
        to_decode = self._states.num_computed[rows] < self._states.max_kv_len[rows]
        # The last token of some requests may be in flight: they need no step, and their pages are freed when it is
        # settled.
        landing = np.count_nonzero(to_decode) < len(rows)
        if landing:
            rows = rows[to_decode]
            reqs = [reqs[idx] for idx in np.flatnonzero(to_decode)]
        decoding = reqs
        if self._micro_batches is not None:
            rows, reqs = self._micro_batches.choose(rows, reqs, len(self._requests.running))
        full = self._kv.rows_without_room(rows)
        if full.size > self._kv.available_pages and reqs and not reqs[0].background:
            self._retract_background(len(full), state)
        if full.size > self._kv.available_pages:
            if not landing:
                return self._retract(rows, reqs, full, decoding + others, state)
            # Requests without a page miss this step: a retraction costs more than waiting for the pages in flight.
            full, waiting = full[: self._kv.available_pages], full[self._kv.available_pages :]
            stays = ~np.isin(rows, waiting)
            rows, reqs = rows[stays], [reqs[idx] for idx in np.flatnonzero(stays)]
        self._kv.grow_by_a_page(full)
        if reqs:
            self._estimator.after_decode()
        return rows, reqs

    def _retract(
        self, rows: IntArray, reqs: list[Req], full: IntArray, victims: list[Req], state: PassState
    ) -> tuple[IntArray, list[Req]]:
        """Retract requests until the others have pages. One request always stays.

        Args:
            rows, reqs: [B] those that would decode in this step.
            full: the entries of `rows` that need a page, one entry per page.
            victims: requests with a row, also those of other micro-batches.
        """
        requests, kv = self._requests, self._kv
        some_stay = len(victims) < requests.num_with_row  # of the other class
        victims = _by_work_lost(victims, self._states, by_priority=self._policy.by_priority)
        gone: set[Req] = set()
        for victim in victims if some_stay else victims[:-1]:
            row = victim.row
            gone.add(victim)
            state.add_retraction(self._preemption.retract(victim, "memory"))
            rows, full = rows[rows != row], full[full != row]
            if full.size <= kv.available_pages:
                break
        reqs = [req for req in reqs if req not in gone]
        if full.size <= kv.available_pages:
            kv.grow_by_a_page(full)
        else:
            starved, rows, reqs = reqs[0], rows[:0], []
            if not self._incoming.will_give_back:  # else those pages will come free
                self._starve(starved, state.now_s)
                state.gave_memory_back = True
        self._preemption.requeue(state.now_s)
        requests.remove_stopped()
        left = requests.with_row
        self._estimator.after_retraction(
            len(left), sum(req.output_len for req in left), sum(req.max_new_tokens for req in left)
        )
        return rows, reqs

    def _retract_background(self, num_pages: int, state: PassState) -> None:
        """Retract requests of the background until interactive ones can have their pages, or until none is left."""
        victims = self._requests.background_with_row
        for victim in _by_work_lost(victims, self._states, by_priority=False) if victims else ():
            state.add_retraction(self._preemption.retract(victim, "background"))
            if num_pages <= self._kv.available_pages:
                break
        self._preemption.requeue(state.now_s)

    def _cause_chaos(self, state: PassState) -> None:
        victim = self._chaos.victim(self._requests.with_row)
        if victim is not None:
            state.add_retraction(self._preemption.retract(victim, "chaos"))
            self._preemption.requeue(state.now_s)

    def _starve(self, req: Req, now_s: float) -> None:
        available, total = self._kv.available_pages, self._kv.num_pages
        message = (
            f"KV memory ran out with one request left: it has {req.prompt_len + req.output_len} tokens and needs "
            f"another page, {available} of {total} can be had; lower max_tokens or raise --max-total-tokens"
        )
        logger.warning("starved rid=%s: %s", req.rid, message)
        self._answers.rows([self._requests.finish(req, Finish(FinishKind.ERROR, message=message), now_s)])


def still_decoding(rows: IntArray, reqs: list[Req]) -> tuple[IntArray, list[Req]]:
    """The planned decodes that still have their row: admission may have preempted some for a more urgent request."""
    kept = [idx for idx, req in enumerate(reqs) if req.row >= 0]
    if len(kept) == len(reqs):
        return rows, reqs
    return rows[np.array(kept, dtype=np.intp)], [reqs[idx] for idx in kept]


def _of_class(
    rows: IntArray, reqs: list[Req], states: RowStates, *, is_background: bool
) -> tuple[IntArray, list[Req]]:
    """The requests of a class among [B] requests with rows."""
    mask = states.background[rows] == is_background
    return rows[mask], list(itertools.compress(reqs, mask.tolist()))


def _by_work_lost(reqs: list[Req], states: RowStates, *, by_priority: bool) -> list[Req]:
    """Least work to lose first; among equals the latest arrival first."""
    rows = np.array([req.row for req in reqs], dtype=np.int32)
    output_len = states.known_len[rows] - states.prompt_len[rows]
    keys = [-np.array([req.seq for req in reqs]), -states.prompt_len[rows], output_len]
    if by_priority:
        keys.append(np.array([req.priority for req in reqs]))
    order = np.lexsort(keys)
    return [reqs[idx] for idx in order]
