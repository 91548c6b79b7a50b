"""`Decodes`: the decode half of a pass. It determines which running requests generate a token in this step."""

from __future__ import annotations

import logging

import numpy as np

from ..runtime.messages import Finish, FinishKind
from .arrays import EMPTY, IntArray
from .estimator.base import OutputEstimator
from .memory.incoming_pages import IncomingPages
from .memory.row_memory import RowMemory
from .micro_batches import ONE_MICRO_BATCH, MicroBatches
from .pass_state import PassState
from .policy.base import SchedulePolicy
from .preemption.chaos import Chaos
from .preemption.preemption import Preemption
from .preemption.retraction import find_pages
from .requests.outputs import Answers
from .requests.req import Req
from .requests.requests import Requests

logger = logging.getLogger(__name__)


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
        chaos: Chaos,
        answers: Answers,
        policy: SchedulePolicy,
        micro_batches: MicroBatches = ONE_MICRO_BATCH,
    ) -> None:
        """Take the parts.

        Args:
            policy: its `by_priority` says whether requests of the lowest priority are retracted first.
            micro_batches: divides the running requests among the steps in flight.
        """
        self._micro_batches = micro_batches
        self._requests = requests
        self._preemption = preemption
        self._states, self._kv, self._incoming = memory.states, memory.kv, incoming
        self._estimator = estimator
        self._chaos = chaos
        self._answers = answers
        self._policy = policy

    def plan(self, state: PassState) -> tuple[IntArray, list[Req]]:
        """([B] rows, [B] requests) that decode in this step. Each has a page for its next token."""
        requests, now_s = self._requests, state.now_s
        self._cause_chaos(state)
        if not requests.running:
            return EMPTY, []
        with_pages = find_pages(
            requests.running,
            requests.partial,
            self._states,
            self._kv,
            lambda victim: state.add_retraction(self._preemption.retract(victim, "memory")),
            by_priority=self._policy.by_priority,
            micro_batches=self._micro_batches,
        )
        if with_pages.retracted or with_pages.starved:
            if with_pages.starved and not self._incoming.num_pages:  # else those pages will come free
                self._starve(with_pages.starved, now_s)
                state.gave_memory_back = True
            self._preemption.requeue(now_s)
            requests.remove_stopped()
            left = requests.with_row
            self._estimator.after_retraction(
                len(left), sum(req.output_len for req in left), sum(req.max_new_tokens for req in left)
            )
        elif with_pages.reqs:
            self._estimator.after_decode()
        return with_pages.rows, with_pages.reqs

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
