"""`Admission`: the prefill half of a pass: whose prompts are computed in this step, and how much of them."""

from __future__ import annotations

from typing import Final

import numpy as np

from ..runtime.config import SchedulerConfig
from .budget import CLIP_MAX_NEW_TOKENS, PrefillBudget
from .decision_log import PassRecord
from .kv_memory import KVMemory
from .new_token_ratio import NewTokenRatio
from .policy.base import MAX_OVERTAKEN, SchedulePolicy
from .prefill_adder import Chunk, PrefillAdder
from .req import ReqStatus
from .req_to_token_pool import ReqToTokenPool
from .requests import Requests
from .row_states import RowStates
from .stats import SchedulerStats
from .verdict import AddReqResult, Reason

LOOK_AHEAD: Final = 16
"""How many requests behind one that lacks memory are tried in a pass; each costs a look into the prefix cache."""

MAX_PARTIAL_PREFILLS: Final = 1
"""Prompts that may be in the middle of their chunks at the same time."""


class Admission:
    """Offers waiting requests to a PrefillAdder in the policy's order, and starts those it takes."""

    __slots__ = (
        "_chunk_size",
        "_kv",
        "_max_prefill_tokens",
        "_policy",
        "_pool",
        "_ratio",
        "_requests",
        "_states",
        "_stats",
    )

    def __init__(
        self,
        config: SchedulerConfig,
        requests: Requests,
        policy: SchedulePolicy,
        *,
        states: RowStates,
        pool: ReqToTokenPool,
        kv: KVMemory,
        ratio: NewTokenRatio,
        stats: SchedulerStats,
    ) -> None:
        assert isinstance(config.chunked_prefill_size, int), "the configuration is not resolved"
        self._chunk_size = None if config.chunked_prefill_size == -1 else config.chunked_prefill_size
        self._max_prefill_tokens = config.max_prefill_tokens
        self._requests = requests
        self._policy = policy
        self._states = states
        self._pool = pool
        self._kv = kv
        self._ratio = ratio
        self._stats = stats

    def skip(self, record: PassRecord, reason: Reason) -> list[Chunk]:
        """No prompt is computed in this pass: one verdict for all."""
        record.num_waiting = len(self._requests.waiting)
        record.end(reason)
        return []

    def plan(self, record: PassRecord, num_decodes: int, now_s: float) -> list[Chunk]:
        """Continue the prompts in progress, then admit waiting requests; gives those admitted rows and pages."""
        record.num_waiting = len(self._requests.waiting)
        if not (record.num_waiting or self._requests.partial):
            return []
        adder = PrefillAdder(
            self._kv,
            self._budget(num_decodes),
            num_free_rows=self._pool.num_free_rows,
            max_partial=MAX_PARTIAL_PREFILLS,
            nothing_runs=not (self._requests.running or self._requests.partial),
        )
        record.budget_before = adder.budget.state()
        for req in self._requests.partial:
            record.continued.append(adder.continue_chunk(req, int(self._states.num_computed[req.row])))
        if record.retracted:
            record.end(Reason.RETRACTING)
        else:
            self._admit(adder, record)
        record.budget_after = adder.budget.state()
        for chunk in adder.chunks:
            self._start(chunk, now_s)
        self._note_overtaken(adder.chunks)
        return adder.chunks

    def _admit(self, adder: PrefillAdder, record: PassRecord) -> None:
        """Offer the waiting requests in the policy's order until a budget is spent.

        A request that lacks memory does not block those behind it: up to `LOOK_AHEAD` of them are tried. Whoever was
        overtaken `MAX_OVERTAKEN` times is overtaken no more, so its turn comes when enough of the running have ended.
        """
        refused = ""
        num_ahead = 0
        for req in self._policy.order(self._requests.waiting, record.now_s):
            spent = adder.exhausted()
            if spent is None and num_ahead > LOOK_AHEAD:
                spent = Reason.LOOK_AHEAD_SPENT
            if spent is not None:
                record.end(spent, behind=refused)
                return
            verdict = adder.add(req)
            record.verdicts.append(verdict)
            if verdict.result is AddReqResult.OTHER:
                record.end(Reason.BEHIND, req.rid)
                return
            if verdict.result is AddReqResult.NO_TOKEN:
                if req.num_overtaken >= MAX_OVERTAKEN:
                    record.end(Reason.OVERTAKEN_AHEAD, req.rid)
                    return
                refused = refused or req.rid
            num_ahead += bool(refused)

    def _start(self, chunk: Chunk, now_s: float) -> None:
        """Give a chunk its row and pages, and the request its new status."""
        req = chunk.req
        if chunk.is_first:
            self._requests.waiting.remove(req)
            req.row = self._pool.allocate()
            self._states.open(req, chunk.start)
            self._kv.open_row(req)
            if req.status is ReqStatus.WAITING:
                req.queue_s = now_s - req.entered_s[ReqStatus.WAITING]
                req.cached_tokens = chunk.start
                self._stats.prompt_tokens += req.prompt_len
                self._stats.cached_tokens += chunk.start
            req.enter(ReqStatus.PREFILL, now_s)
            self._requests.partial.append(req)
        self._kv.grow(req.row, chunk.start + chunk.length)
        if chunk.is_last:
            self._requests.partial.remove(req)
            req.enter(ReqStatus.DECODE, now_s)
            self._requests.running.add([req])

    def _budget(self, num_decodes: int) -> PrefillBudget:
        rest, output = self._expected()
        return PrefillBudget(
            page_size=self._kv.page_size,
            available_tokens=self._kv.available_pages * self._kv.page_size,
            expected_tokens=rest + output,
            max_prefill_tokens=self._max_prefill_tokens,
            chunk_size=self._chunk_size,
            num_decodes=num_decodes,
        )

    def _expected(self) -> tuple[int, float]:
        """Tokens that those with a row will still add: the rest of the prompts, surely, and the outputs, probably."""
        states, partial = self._states, self._requests.partial
        rows = self._requests.running.rows
        rest = 0
        to_come = states.max_kv_len[rows] - states.num_computed[rows]
        if partial:
            partial_rows = np.array([req.row for req in partial], dtype=np.int32)
            fill_len = states.known_len[partial_rows]
            rest = int((fill_len - states.num_computed[partial_rows]).sum())
            rows = np.concatenate([rows, partial_rows])
            to_come = np.concatenate([to_come, states.max_kv_len[partial_rows] - fill_len])
        share = np.where(states.ignore_eos[rows], 1.0, self._ratio.current)
        return rest, float(share @ np.minimum(to_come, CLIP_MAX_NEW_TOKENS))

    def _note_overtaken(self, chunks: list[Chunk]) -> None:
        newest = max((chunk.req.seq for chunk in chunks if chunk.is_first), default=0)
        for req in self._requests.waiting:
            if req.seq > newest:
                break
            req.num_overtaken += 1
