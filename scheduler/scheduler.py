"""`Scheduler`: decides what runs next and accounts for every page. No I/O, no clock, no device.

Messages and the time come in as arguments; batches, and rows for the detokenizer, come out. The server wires it to
sockets and a model runner (`event_loop.py`), tests to a scripted one. Same calls, same decisions, bit for bit.

    handle ──► waiting queue ──policy, PrefillAdder──► rows with pages ──ScheduleBatch──► runner ──► settle ──► outputs
                     ▲                                       │
                     └──────────── retraction ◄──────────────┘
"""

from __future__ import annotations

import logging
from typing import assert_never

from ..runtime.config import CacheConfig, SchedulerConfig
from ..runtime.feasibility import Capacity, pages_for
from ..runtime.messages import (
    AbortRequest,
    BatchTokenOutput,
    DetokenizerInput,
    Explain,
    Explanation,
    Finish,
    FinishKind,
    FlushCache,
    FlushCacheDone,
    GenerateRequest,
    GrammarReady,
    PinDone,
    PinPrefix,
    SchedulerInput,
    SchedulerReport,
    TokenOutput,
    Usage,
)
from ..runtime.step_plan import StepResult
from .admission import Admission
from .arrays import EMPTY, IntArray
from .batch import ScheduleBatch
from .decision_log import DecisionLog, PassRecord, Retraction
from .intake import reason_to_refuse
from .kv_memory import KVMemory
from .ledger import Ledger, LedgerError
from .new_token_ratio import NewTokenRatio
from .outputs import StopRules, text_options
from .page_allocator import PageAllocator
from .policy.base import Load, PolicyParts
from .policy.make import make_policy
from .prefill_adder import Chunk
from .prefix_cache import NoPrefixCache, PrefixCache
from .radix_cache import RadixCache
from .req import TOKEN_ID_BYTES, Req
from .req_to_token_pool import ReqToTokenPool
from .requests import Requests
from .results import ResultSettler
from .retraction import make_room
from .row_states import RowStates
from .stats import SchedulerStats
from .verdict import Reason

logger = logging.getLogger(__name__)


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
        self._config = config
        self._capacity = capacity
        page_size, num_rows = capacity.page_size, capacity.max_running_requests
        self._allocator = PageAllocator(capacity.num_pages)
        self._pool = ReqToTokenPool(num_rows, pages_for(capacity.max_model_len, page_size), page_size)
        self._states = RowStates(num_rows, capacity.max_model_len)
        self._prefix_cache: PrefixCache = RadixCache(page_size) if cache.radix_cache else NoPrefixCache()
        self._kv = KVMemory(self._allocator, self._pool, self._states, self._prefix_cache)
        self._ledger = Ledger(self._allocator, self._pool, self._prefix_cache, self._kv)

        self._policy = make_policy(config, PolicyParts(self._kv.match, page_size, self._load))
        self._requests = Requests(self._kv, self._policy)
        self._ratio = NewTokenRatio(config.schedule_conservativeness)
        self._stats = SchedulerStats()
        self._admission = Admission(
            config,
            self._requests,
            self._policy,
            states=self._states,
            pool=self._pool,
            kv=self._kv,
            ratio=self._ratio,
            stats=self._stats,
        )
        self._settler = ResultSettler(
            self._requests,
            states=self._states,
            pool=self._pool,
            kv=self._kv,
            stop_rules=StopRules(eos_token_ids, capacity.vocab_size),
            stats=self._stats,
        )
        self.decisions = DecisionLog()
        self._outputs: list[DetokenizerInput] = []
        self._last_step_id = 0
        self._prefill_steps_in_a_row = 0

    def _load(self) -> Load:
        held = self._kv.num_pages - self._kv.available_pages
        return Load(
            len(self._requests.with_row), self._capacity.max_running_requests, held / self._kv.num_pages
        )

    # ------------------------------------------------------------ messages

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._requests)

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
            case GrammarReady():
                pass
            case PinPrefix():
                self._outputs.append(PinDone(message.pin_id, 0, len(message.input_ids) // TOKEN_ID_BYTES))
            case Explain():
                self._outputs.append(Explanation(message.explain_id, False, ""))
            case _:
                assert_never(message)

    def take_outputs(self) -> list[DetokenizerInput]:
        """Everything to send since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def _receive(self, message: GenerateRequest, now_s: float) -> None:
        if message.rid in self._requests.by_id:
            # Ids are the server's own, so this is its bug. An answer would end the stream of the one that lives.
            logger.error("dropped a second request with the id of a live one rid=%s", message.rid)
            return
        reason = reason_to_refuse(message, self._capacity)
        if reason is not None:
            logger.info("refused rid=%s: %s", message.rid, reason)
            finish = Finish(FinishKind.ERROR, message=reason, status=400)
            usage = Usage(len(message.input_ids) // TOKEN_ID_BYTES, 0)
            row = TokenOutput(message.rid, b"", usage, finish, text_options(message.sampling))
            self._outputs.append(BatchTokenOutput([row]))
            return
        self._requests.receive(message, now_s)

    def _abort(self, message: AbortRequest, now_s: float) -> None:
        req = self._requests.by_id.get(message.rid)
        if req is not None:
            row = self._requests.finish(req, Finish(FinishKind.ABORT, message=message.reason), now_s)
            self._requests.forget_departed()
            self._outputs.append(BatchTokenOutput([row]))

    # ------------------------------------------------------------ planning

    def next_batch(self, now_s: float) -> ScheduleBatch | None:
        """Plan the next step; None if there is nothing to do (or nothing until a step in flight is settled).

        Mixed (the default): running requests decode, and prompt chunks share the step. Otherwise prompts go first,
        and the running decode when there are none to admit, or after so many prefill steps in a row. When the last
        request has left, one step without tokens has the runner forget it.
        """
        record = PassRecord(now_s)
        batch = self._plan_pass(record, now_s)
        while batch is None and record.gave_memory_back:  # whoever stood in the way has left
            record = PassRecord(now_s)
            batch = self._plan_pass(record, now_s)
        return batch

    def _plan_pass(self, record: PassRecord, now_s: float) -> ScheduleBatch | None:
        """One pass: who decodes, whose prompts are computed, and the batch made of them; `record` tells about it."""
        evicted_before = self._kv.evicted_pages_total
        if self._config.phases == "mixed":
            decode_rows, decode_reqs = self._plan_decodes(record, now_s)
            chunks = self._admission.plan(record, len(decode_reqs), now_s)
        else:
            chunks = self._plan_prefill_alone(record, now_s)
            decode_rows, decode_reqs = (EMPTY, []) if chunks else self._plan_decodes(record, now_s)

        batch = None
        has_work = bool(chunks or decode_reqs)
        if has_work or (self._pool.has_left_rows and not self._requests):
            # The second is a step without tokens (IDLE): no other may come for hours to tell the runner who has left.
            self._last_step_id += 1
            self._stats.num_steps += has_work
            batch = ScheduleBatch(
                self._last_step_id,
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
        if not record.is_empty:  # else an idle server would soon remember nothing
            self.decisions.append(record)
        return batch

    def _plan_prefill_alone(self, record: PassRecord, now_s: float) -> list[Chunk]:
        """Without mixed steps: the chunks of a prefill step, or none when the running have waited long enough."""
        if self._requests.running and self._prefill_steps_in_a_row >= self._config.max_prefill_steps_in_a_row:
            chunks = self._admission.skip(record, Reason.DECODES_FIRST)
        else:
            chunks = self._admission.plan(record, 0, now_s)
        self._prefill_steps_in_a_row = self._prefill_steps_in_a_row + 1 if chunks else 0
        return chunks

    def _plan_decodes(self, record: PassRecord, now_s: float) -> tuple[IntArray, list[Req]]:
        """Who decodes in this step, each with a page for its next token."""
        requests = self._requests
        if not requests.running:
            return EMPTY, []
        room = make_room(requests.running, requests.partial, self._states, self._kv)
        if room.retracted or room.starved:
            for req in room.retracted:
                requests.put_back(req, now_s)
            if room.starved:
                self._outputs.append(BatchTokenOutput([self._starve(room.starved, now_s)]))
            requests.forget_departed()
            self._stats.retracted_reqs += len(room.retracted)
            record.retractions = [
                Retraction(req.rid, "recompute", "memory", 0, req.output_len) for req in room.retracted
            ]
            record.gave_memory_back = True
            left = requests.with_row
            self._ratio.after_retraction(
                len(left), sum(req.output_len for req in left), sum(req.max_new_tokens for req in left)
            )
        elif room.reqs:
            self._ratio.after_decode()
        return room.rows, room.reqs

    def _starve(self, req: Req, now_s: float) -> TokenOutput:
        available, total = self._kv.available_pages, self._capacity.num_pages
        message = (
            f"KV memory ran out with one request left: it has {req.prompt_len + req.output_len} tokens and needs "
            f"another page, {available} of {total} can be had; lower max_tokens or raise --max-total-tokens"
        )
        logger.warning("starved rid=%s: %s", req.rid, message)
        return self._requests.finish(req, Finish(FinishKind.ERROR, message=message), now_s)

    # ------------------------------------------------------------ settling

    def settle(self, batch: ScheduleBatch, result: StepResult, now_s: float) -> None:
        """Take the result of a step; see `ResultSettler.settle`. Once per batch, in the order of planning."""
        rows = self._settler.settle(batch, result, now_s)
        if rows:
            self._outputs.append(BatchTokenOutput(rows))

    # ------------------------------------------------------------ idle, and figures

    def on_idle(self) -> None:
        """Nothing waits, runs or is in flight: the books must balance, and what was learnt about requests is forgotten.

        Raises:
            LedgerError: pages, locks or rows are missing, or requests wait that no pass admits. A bug.
        """
        if self._requests:
            num_waiting, num_with_row = len(self._requests.waiting), len(self._requests.with_row)
            raise LedgerError(f"{num_waiting} requests wait and {num_with_row} run, but no step comes of it")
        self._ledger.check_idle()
        self._ratio.reset()

    def audit(self) -> None:
        """Check every page, lock and row; for tests, since it walks over all of them.

        Raises:
            LedgerError: with what is wrong.
        """
        self._ledger.audit(self._requests.with_row)

    def report(self, now_s: float) -> SchedulerReport:
        """The figures of the moment and the totals."""
        stats, page_size = self._stats, self._capacity.page_size
        return SchedulerReport(
            sent_s=now_s,
            num_running_reqs=len(self._requests.with_row),
            num_queue_reqs=len(self._requests.waiting),
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
