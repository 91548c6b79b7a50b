"""`Scheduler`: decides what runs next and accounts for every page. No I/O, no clock, no device.

Messages and the time come in as arguments; batches, and rows for the detokenizer, come out. The server wires it to
sockets and a model runner (`event_loop.py`), tests to a scripted one. Same calls, same decisions, bit for bit.

    handle ──► waiting queue ──policy, PrefillAdder──► rows with pages ──ScheduleBatch──► runner ──► settle ──► outputs
                     ▲                                       │
                     └──────────── retraction ◄──────────────┘
"""

from __future__ import annotations

import logging
from typing import Final, assert_never

import numpy as np

from ..runtime.config import CacheConfig, SchedulerConfig
from ..runtime.feasibility import Capacity, pages_for
from ..runtime.messages import (
    AbortRequest,
    BatchTokenOutput,
    DetokenizerInput,
    Finish,
    FinishKind,
    FlushCache,
    FlushCacheDone,
    GenerateRequest,
    Logprobs,
    SchedulerInput,
    SchedulerReport,
    TokenOutput,
    Usage,
)
from ..runtime.step_plan import StepResult
from .arrays import EMPTY, BoolArray, IntArray
from .batch import ScheduleBatch
from .budget import CLIP_MAX_NEW_TOKENS, PrefillBudget
from .decision_log import DecisionLog, PassRecord
from .intake import reason_to_refuse
from .kv_memory import KVMemory
from .ledger import Ledger, LedgerError
from .new_token_ratio import NewTokenRatio
from .outputs import StopRules, output_row, text_options
from .page_allocator import PageAllocator
from .policy.base import MAX_OVERTAKEN, SchedulePolicy
from .policy.fcfs import Fcfs
from .policy.lpm import Lpm
from .prefill_adder import Chunk, PrefillAdder
from .prefix_cache import NoPrefixCache, PrefixCache
from .radix_cache import RadixCache
from .req import TOKEN_ID_BYTES, Req, ReqStatus
from .req_to_token_pool import ReqToTokenPool
from .retraction import make_room
from .row_states import RowStates
from .running_batch import RunningBatch
from .stats import SchedulerStats
from .verdict import AddReqResult, Reason
from .waiting_queue import WaitingQueue

logger = logging.getLogger(__name__)

LOOK_AHEAD: Final = 16
"""How many requests behind one that lacks memory are tried in a pass; each costs a look into the prefix cache."""

MAX_PARTIAL_PREFILLS: Final = 1
"""Prompts that may be in the middle of their chunks at the same time."""


class Scheduler:
    """See the module. All state of all requests is here or in the parts it owns."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        capacity: Capacity,
        eos_token_ids: frozenset[int],
    ) -> None:
        """Make a scheduler without requests.

        Args:
            config: resolved; no "auto".
            cache: resolved; page size and pool size are taken from `capacity`.
            capacity: what the runner can hold.
            eos_token_ids: tokens that end an output unless `ignore_eos`.
        """
        assert isinstance(config.chunked_prefill_size, int), "the configuration is not resolved"
        self._config = config
        self._capacity = capacity
        self._chunk_size = None if config.chunked_prefill_size == -1 else config.chunked_prefill_size

        page_size, num_rows = capacity.page_size, capacity.max_running_requests
        self._allocator = PageAllocator(capacity.num_pages)
        self._pool = ReqToTokenPool(num_rows, pages_for(capacity.max_model_len, page_size), page_size)
        self._states = RowStates(num_rows, capacity.max_model_len)
        self._prefix_cache: PrefixCache = RadixCache(page_size) if cache.radix_cache else NoPrefixCache()
        self._kv = KVMemory(self._allocator, self._pool, self._states, self._prefix_cache)
        self._ledger = Ledger(self._allocator, self._pool, self._prefix_cache, self._kv)

        self._policy = self._make_policy()
        self._ratio = NewTokenRatio(config.schedule_conservativeness)
        self._stop_rules = StopRules(eos_token_ids, capacity.vocab_size)
        self._stats = SchedulerStats()
        self.decisions = DecisionLog()

        self._reqs: dict[str, Req] = {}  # all that are not finished
        self._waiting = WaitingQueue()
        self._partial: list[Req] = []  # prompts in the middle of their chunks
        self._running = RunningBatch()
        self._outputs: list[DetokenizerInput] = []
        self._num_arrivals = 0
        self._prefill_steps_in_a_row = 0

    def _make_policy(self) -> SchedulePolicy:
        match self._config.schedule_policy:
            case "fcfs":
                return Fcfs()
            case "lpm":
                return Lpm(lambda req: self._kv.match(req).num_pages)
            case _ as never:
                assert_never(never)

    # ------------------------------------------------------------ messages

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._reqs)

    def handle(self, message: SchedulerInput, now_s: float) -> None:
        """Take a message; answers, if any, are in `take_outputs`."""
        match message:
            case GenerateRequest():
                self._receive(message, now_s)
            case AbortRequest():
                self._abort(message, now_s)
            case FlushCache():
                dropped, kept = self._kv.flush()
                page_size = self._capacity.page_size
                self._outputs.append(FlushCacheDone(message.flush_id, dropped * page_size, kept * page_size))
            case _:
                assert_never(message)

    def take_outputs(self) -> list[DetokenizerInput]:
        """Everything to send since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def _receive(self, message: GenerateRequest, now_s: float) -> None:
        reason = reason_to_refuse(message, self._capacity)
        if reason is None and message.rid in self._reqs:
            reason = f"request id {message.rid!r} is in use"
        if reason is not None:
            logger.info("refused rid=%s: %s", message.rid, reason)
            finish = Finish(FinishKind.ERROR, message=reason, status=400)
            usage = Usage(len(message.input_ids) // TOKEN_ID_BYTES, 0)
            row = TokenOutput(message.rid, b"", usage, finish, text_options(message.sampling))
            self._outputs.append(BatchTokenOutput([row]))
            return
        self._num_arrivals += 1
        req = self._reqs[message.rid] = Req(message, self._num_arrivals, now_s)
        self._waiting.append(req)

    def _abort(self, message: AbortRequest, now_s: float) -> None:
        req = self._reqs.get(message.rid)
        if req is not None:
            row = self._end(req, Finish(FinishKind.ABORT, message=message.reason), now_s)
            self._forget_finished()
            self._outputs.append(BatchTokenOutput([row]))

    # ------------------------------------------------------------ planning

    def next_batch(self, now_s: float) -> ScheduleBatch | None:
        """Plan the next step; None if there is nothing to do (or nothing until a step in flight is settled).

        Mixed (the default): running requests decode, and prompt chunks share the step. Otherwise prompts go first,
        and the running decode when there are none to admit, or after so many prefill steps in a row.
        """
        batch = self._plan_pass(now_s)
        while batch is None and self.decisions.last.gave_memory_back:
            batch = self._plan_pass(now_s)  # whoever stood in the way has left
        return batch

    def _plan_pass(self, now_s: float) -> ScheduleBatch | None:
        """One pass: who decodes, whose prompts are computed, the batch made of them, and the record of it."""
        record = PassRecord(now_s)
        evicted_before = self._kv.evicted_pages_total
        if self._config.mixed_chunk:
            decode_rows, decode_reqs = self._plan_decodes(record, now_s)
            chunks = self._plan_prefill(record, len(decode_reqs), now_s)
        else:
            decode_rows, decode_reqs = EMPTY, []
            chunks = self._plan_prefill(record, 0, now_s)
            self._prefill_steps_in_a_row = self._prefill_steps_in_a_row + 1 if chunks else 0
            if not chunks:
                decode_rows, decode_reqs = self._plan_decodes(record, now_s)

        batch = None
        if chunks or decode_reqs:
            self._stats.num_steps += 1
            batch = ScheduleBatch(
                self._stats.num_steps,
                chunks,
                decode_rows,
                decode_reqs,
                states=self._states,
                pool=self._pool,
                kv=self._kv,
            )
            record.step_id, record.mode = batch.plan.step_id, batch.plan.mode
        record.num_decodes = len(decode_reqs)
        record.evicted_pages = self._kv.evicted_pages_total - evicted_before
        self.decisions.append(record)
        return batch

    def _plan_decodes(self, record: PassRecord, now_s: float) -> tuple[IntArray, list[Req]]:
        """Who decodes in this step, each with a page for its next token."""
        if not self._running:
            return EMPTY, []
        room = make_room(self._running, self._partial, self._states, self._kv)
        if room.retracted or room.starved:
            for req in room.retracted:
                self._retract(req, now_s)
            if room.starved:
                self._outputs.append(BatchTokenOutput([self._starve(room.starved, now_s)]))
            self._forget_finished()
            record.retracted = [req.rid for req in room.retracted]
            record.gave_memory_back = True
            self._raise_ratio()
        elif room.reqs:
            self._ratio.after_decode()
        return room.rows, room.reqs

    def _plan_prefill(self, record: PassRecord, num_decodes: int, now_s: float) -> list[Chunk]:
        """Continue the prompts in progress, then admit waiting requests; gives those admitted rows and pages."""
        record.num_waiting = len(self._waiting)
        if not (record.num_waiting or self._partial):
            return []
        if self._decodes_are_due():
            record.end(Reason.DECODES_FIRST)
            return []
        adder = PrefillAdder(
            self._kv,
            self._budget(num_decodes),
            num_free_rows=self._pool.num_free_rows,
            max_partial=MAX_PARTIAL_PREFILLS,
            nothing_runs=not (self._running or self._partial),
        )
        record.budget_before = adder.budget.state()
        for req in self._partial:
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
        for req in self._policy.order(self._waiting):
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
            self._waiting.remove(req)
            req.row = self._pool.allocate()
            self._states.open(req, chunk.start)
            self._kv.open_row(req)
            if req.status is ReqStatus.WAITING:
                req.queue_s = now_s - req.entered_s[ReqStatus.WAITING]
                req.cached_tokens = chunk.start
                self._stats.prompt_tokens += req.prompt_len
                self._stats.cached_tokens += chunk.start
            req.num_overtaken = 0
            req.enter(ReqStatus.PREFILL, now_s)
            self._partial.append(req)
        self._kv.grow(req.row, chunk.start + chunk.length)
        if chunk.is_last:
            self._partial.remove(req)
            req.enter(ReqStatus.DECODE, now_s)
            self._running.add([req])

    def _decodes_are_due(self) -> bool:
        """Without mixed steps: whether the running requests have been held up long enough."""
        in_a_row = self._prefill_steps_in_a_row
        return bool(self._running) and in_a_row >= self._config.max_prefill_steps_in_a_row

    def _budget(self, num_decodes: int) -> PrefillBudget:
        rows = self._running.rows
        remaining = np.minimum(
            self._states.max_kv_len[rows] - self._states.num_computed[rows], CLIP_MAX_NEW_TOKENS
        )
        expected = np.where(self._states.ignore_eos[rows], 1.0, self._ratio.current) @ remaining
        return PrefillBudget(
            page_size=self._capacity.page_size,
            available_tokens=self._kv.available_pages * self._capacity.page_size,
            expected_tokens=float(expected),
            max_prefill_tokens=self._config.max_prefill_tokens,
            chunk_size=self._chunk_size,
            num_decodes=num_decodes,
        )

    def _note_overtaken(self, chunks: list[Chunk]) -> None:
        newest = max((chunk.req.seq for chunk in chunks if chunk.is_first), default=0)
        for req in self._waiting:
            if req.seq > newest:
                break
            req.num_overtaken += 1

    # ------------------------------------------------------------ memory ran out

    def _retract(self, req: Req, now_s: float) -> None:
        """Send a request whose memory was taken back to its place in the queue."""
        req.num_retractions += 1
        self._stats.retracted_reqs += 1
        if not req.answered:
            req.prompt_logprobs = []  # they will come again from the start
        req.enter(ReqStatus.RETRACTED, now_s)
        self._waiting.put_back(req)

    def _starve(self, req: Req, now_s: float) -> TokenOutput:
        available, total = self._kv.available_pages, self._capacity.num_pages
        message = (
            f"KV memory ran out with one request left: it has {req.prompt_len + req.output_len} tokens and needs "
            f"another page, {available} of {total} can be had; lower max_tokens or raise --max-total-tokens"
        )
        logger.warning("starved rid=%s: %s", req.rid, message)
        return self._end(req, Finish(FinishKind.ERROR, message=message), now_s)

    def _raise_ratio(self) -> None:
        left = self._running.reqs + self._partial
        self._ratio.after_retraction(
            len(left), sum(req.output_len for req in left), sum(req.max_new_tokens for req in left)
        )

    # ------------------------------------------------------------ settling

    def settle(self, batch: ScheduleBatch, result: StepResult, now_s: float) -> None:
        """Take the result of a step: append tokens, finish requests, fill the prefix cache, make the rows to send.

        Later steps may have been planned meanwhile, and requests of this batch may have left since: those are known by
        the epoch of their row, and what the step made for them is dropped.
        """
        assert result.step_id == batch.plan.step_id, (result.step_id, batch.plan.step_id)
        num_live = len(self._reqs)
        here = batch.still_here(self._pool)
        self._states.num_settled[batch.rows[here]] = batch.end[here]
        rows = self._settle_errors(batch, result, here, now_s)
        self._settle_prompts(batch, result, here)
        rows += self._settle_tokens(batch, result, here, now_s)
        self._stats.step_s += result.forward_s
        if rows:
            self._outputs.append(BatchTokenOutput(rows))
        if len(self._reqs) < num_live:
            self._forget_finished()

    def _settle_errors(
        self, batch: ScheduleBatch, result: StepResult, here: BoolArray, now_s: float
    ) -> list[TokenOutput]:
        """End the requests that failed on their own; their KV may be bad, so it is not kept."""
        rows = []
        for idx, message in result.errors.items():
            if here[idx]:
                here[idx] = False
                finish = Finish(FinishKind.ERROR, message=message)
                rows.append(self._end(batch.reqs[idx], finish, now_s, keep=False))
        return rows

    def _settle_prompts(self, batch: ScheduleBatch, result: StepResult, here: BoolArray) -> None:
        """Offer what was computed of prompts to the prefix cache, at once: the next request may share it."""
        for idx in range(batch.num_extends):
            if here[idx]:
                req = batch.reqs[idx]
                if idx in result.prompt_logprobs and not req.answered:
                    req.prompt_logprobs.append(result.prompt_logprobs[idx])
                self._kv.cache_settled(req)

    def _settle_tokens(
        self, batch: ScheduleBatch, result: StepResult, here: BoolArray, now_s: float
    ) -> list[TokenOutput]:
        """Append the sampled tokens; a row for each request that sampled."""
        positions = np.flatnonzero(here[batch.sampled])  # in `next_token_ids`
        batch_indices = batch.sampled[positions]
        token_ids = np.frombuffer(result.next_token_ids, dtype=np.int32)[positions]
        pool_rows = batch.rows[batch_indices]
        lengths = self._states.append(pool_rows, token_ids)
        suspects = self._stop_rules.suspects(self._states, pool_rows, token_ids, lengths)
        suspects |= batch_indices < batch.num_extends  # the first row of a request says more
        self._stats.generation_tokens += len(positions)

        rows = []
        id_bytes = token_ids.tobytes()
        for k, (idx, suspect) in enumerate(zip(batch_indices.tolist(), suspects.tolist(), strict=True)):
            req = batch.reqs[idx]
            req.output_len += 1
            token_id = id_bytes[k * TOKEN_ID_BYTES : (k + 1) * TOKEN_ID_BYTES]
            if not suspect:
                rows.append(TokenOutput(req.rid, token_id, req.usage()))
                continue
            logprobs = None
            if req.sampling.logprobs is not None and result.logprobs:
                logprobs = result.logprobs[positions[k]]
            finish = self._stop_rules.finish(req, int(token_ids[k]))
            if finish is None:
                rows.append(output_row(req, token_id, logprobs=logprobs))
            else:
                rows.append(self._end(req, finish, now_s, token_id, logprobs))
        return rows

    def _end(
        self,
        req: Req,
        finish: Finish,
        now_s: float,
        token_ids: bytes = b"",
        logprobs: Logprobs | None = None,
        *,
        keep: bool = True,
    ) -> TokenOutput:
        """Finish a request wherever it is, free all it has, and make its last row.

        The sampled token that ends it has no KV and never gets any. Callers call `_forget_finished` afterwards.
        """
        if req.is_waiting:
            self._waiting.remove(req)
        else:
            self._kv.release(req, keep=keep)
        req.enter(ReqStatus.FINISHED, now_s)
        del self._reqs[req.rid]
        return output_row(req, token_ids, finish, logprobs)

    def _forget_finished(self) -> None:
        """Take requests that finished or were retracted out of the sets of those that run."""
        still_decode = [req.status is ReqStatus.DECODE for req in self._running.reqs]
        if not all(still_decode):
            self._running.keep(np.array(still_decode))
        self._partial = [req for req in self._partial if req.status is ReqStatus.PREFILL]

    # ------------------------------------------------------------ idle, and figures

    def on_idle(self) -> None:
        """Nothing waits, runs or is in flight: the books must balance, and what was learnt about requests is forgotten.

        Raises:
            LedgerError: pages, locks or rows are missing, or requests wait that no pass admits. A bug.
        """
        if self._reqs:
            raise LedgerError(
                f"{len(self._waiting)} requests wait and {len(self._running)} run, but no step comes of it"
            )
        self._ledger.check_idle()
        self._ratio.reset()

    def audit(self) -> None:
        """Check every page, lock and row; for tests, since it walks over all of them.

        Raises:
            LedgerError: with what is wrong.
        """
        self._ledger.audit(self._running.reqs + self._partial)

    def report(self, now_s: float) -> SchedulerReport:
        """The figures of the moment and the totals."""
        stats, page_size = self._stats, self._capacity.page_size
        return SchedulerReport(
            sent_s=now_s,
            num_running_reqs=len(self._running) + len(self._partial),
            num_queue_reqs=len(self._waiting),
            kv_used_tokens=self._kv.held_pages * page_size,
            kv_cached_tokens=self._kv.cached_pages * page_size,
            kv_total_tokens=self._capacity.max_total_tokens,
            new_token_ratio=self._ratio.current,
            retracted_reqs_total=stats.retracted_reqs,
            prompt_tokens_total=stats.prompt_tokens,
            generation_tokens_total=stats.generation_tokens,
            cached_tokens_total=stats.cached_tokens,
            evicted_tokens_total=self._kv.evicted_pages_total * page_size,
            num_steps_total=stats.num_steps,
            step_s_total=stats.step_s,
        )
