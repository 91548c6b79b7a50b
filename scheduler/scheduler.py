"""`Scheduler`: decides what runs next and accounts for every KV page. It does no I/O and uses no clock and no device.

Messages and the time are arguments; batches, and rows for the detokenizer, are results. Equal calls give equal
decisions, bit for bit. The server connects a scheduler to sockets and a model runner (`event_loop.py`), tests connect
it to a scripted runner, the simulator to a cost model.

    handle ──► waiting queue ──policy, PrefillAdder──► rows with pages ──ScheduleBatch──► runner ──► settle ──► outputs
                     ▲                                       │
                     └──── retraction, preemption ◄──────────┘

One step, as calls (`Pipeline` makes them in the server):

    handle(message)        a new request joins the waiting queue
    next_batch(now_s)      one pass, which returns a batch or None
        deadlines, pins        expired requests and pins end
        phases.plan            divides the step between prompts and decodes, as `phases.py` says:
            Decodes.plan           gives each running request a page for its next token; evicts, then retracts
            Admission.plan         continues partial prefills, then admits waiting requests in the policy's order
        speculation.plan       draft tokens for the decodes
        multi_step.plan        the number of inner steps
        plan_step              makes the `ScheduleBatch` with its `StepPlan`
    runner.launch(plan)    the device computes; with overlap, the next pass is planned meanwhile
    settle(batch, result)  appends tokens, tests stop rules, frees memory, offers computed pages to the prefix cache
    take_outputs()         rows for the detokenizer
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import assert_never

from ..runtime.config.engine_config import CacheConfig, SchedulerConfig
from ..runtime.feasibility import Capacity
from ..runtime.grammar_use import GrammarUse
from ..runtime.messages import (
    AbandonRequests,
    AbortRequest,
    AdapterRead,
    BatchTokenOutput,
    Call,
    CallDone,
    Finish,
    FinishKind,
    FlushCache,
    GenerateRequest,
    GrammarReady,
    SchedulerInput,
)
from ..runtime.scheduler_report import SchedulerReport
from ..runtime.step_plan import ForwardMode, StepResult
from ..runtime.transport.kv_tiers import Forgotten, Found, Loaded, Stored
from ..runtime.transport.kv_transfer import (
    FromPeer,
    PagesWritten,
    PeerLost,
)
from .adapters.adapter_table import Adapter
from .arrays import BoolArray
from .assembly import SchedulerParts
from .batch import ScheduleBatch
from .grammar.grammar_rules import ends_by_grammar, resume
from .grammar.mask_filler import MaskFiller
from .grammar.matchers import FailedMatcher, GuardedMatcher, MatcherSource
from .memory.pages import LedgerError
from .pass_state import PassState, record_of
from .phases import Work
from .prefix_cache.block_events import BlockEvent
from .records.decision_log import Arrived, DecisionLog, Handover, RefusedToken, Settled, vector_digest
from .report import report_of
from .requests.intake import reason_to_refuse
from .requests.outputs import refusal_row
from .requests.req import Req, ReqStatus
from .step_planner import by_adapter, plan_step
from .transfer.role import NO_CHANGES, Changes, Command, Step

logger = logging.getLogger(__name__)

_QUEUED = (ReqStatus.WAITING, ReqStatus.RETRACTED, ReqStatus.RECEIVING)


class Scheduler:
    """See the module. The parts that `assembly.py` puts together hold the state of all requests.

    Attributes:
        decisions: what the last passes decided, with the reasons.
        masks: the token masks of a planned step.
        media_ids: ids of images.
        settled_step: the last step that was settled; 0 if none was.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        capacity: Capacity,
        eos_token_ids: frozenset[int],
        decisions: DecisionLog | None = None,
        *,
        streams: bool = True,
        matchers: MatcherSource | None = None,
        records_blocks: bool = False,
    ) -> None:
        """Make a scheduler without requests.

        Args:
            config: resolved; no "auto".
            cache: resolved; page size and pool size are taken from `capacity`.
            capacity: what the runner can hold.
            eos_token_ids: tokens that end an output unless `ignore_eos`.
            decisions: the log that keeps the decisions; None makes a new one.
            streams: whether clients read tokens as they are generated. If not, only a request's first row, its last
                row and rows with more than a token are made.
            matchers: where the matchers of grammars come from; None: no request has a grammar.
            records_blocks: whether changes of the prefix cache are recorded; then `take_block_events` must be called.
        """
        self._capacity = capacity
        self.decisions = decisions if decisions is not None else DecisionLog()
        self._parts = parts = SchedulerParts(
            config,
            cache,
            capacity,
            eos_token_ids,
            self.decisions,
            streams=streams,
            records_blocks=records_blocks,
        )
        self._requests, self._kv, self._stats = parts.requests, parts.memory.kv, parts.stats
        self._answers, self._policy, self._deadlines = parts.answers, parts.policy, parts.deadlines
        self._transfer = parts.transfer
        self.media_ids = parts.media_ids
        self._matchers = matchers
        self.masks = MaskFiller(capacity.vocab_size, parts.memory.pool)
        self._last_step_id = self.settled_step = 0
        self._held: deque[tuple[int, Sequence[Command]]] = (
            deque()
        )  # with the step that must be settled before
        self._last_pass: PassState | None = None  # in which there was something to decide
        self._abandoned_before_s = 0.0

    # ------------------------------------------------------------ messages

    @property
    def num_unfinished(self) -> int:
        """Number of requests that wait or run."""
        return len(self._requests)

    @property
    def highest_used_page(self) -> int:
        """The highest page id of the KV pool that was ever allocated; 0 if none was."""
        return self._kv.highest_used_page

    @property
    def num_stages(self) -> int:
        return self._capacity.num_stages

    def new_masks(self) -> MaskFiller:
        """Like `masks`, for a step whose masks must outlive those of later steps."""
        return MaskFiller(self._capacity.vocab_size, self._parts.memory.pool)

    def handle(self, message: SchedulerInput, now_s: float) -> None:
        """Take a message. `take_outputs` and `take_call_answers` return the answers, if there are any."""
        match message:
            case GenerateRequest():
                self._receive(message, now_s)
            case AbortRequest():
                req = self._requests.by_id.get(message.rid)
                if req is not None:
                    self._end([(req, Finish(FinishKind.ABORT, message=message.reason))], now_s)
            case AbandonRequests():
                self._abandon(message.before_s, now_s)
            case GrammarReady():
                self._take_grammar(message, now_s)
            case Call():
                changes = NO_CHANGES
                if isinstance(message.request, FlushCache):
                    if message.request.device:
                        self._parts.encoder_cache.flush()
                    if message.request.tier:
                        changes = self._transfer.flushed(message.call_id, now_s)
                self._parts.calls.handle(message, now_s, self._end_users_of)
                self._change(changes, now_s)
            case AdapterRead(store_id=store_id, error=error):
                self._parts.calls.adapter_read(store_id, error, now_s, self._end_users_of)
            case FromPeer() | PagesWritten() | PeerLost() | Found() | Loaded() | Stored() | Forgotten():
                self._change(self._transfer.handle(message, now_s), now_s)
            case _:
                assert_never(message)

    def take_outputs(self) -> list[BatchTokenOutput]:
        """The rows for the detokenizer since the last call, in order."""
        return self._answers.take()

    def take_call_answers(self) -> list[CallDone]:
        """The answers to calls since the last call of this, in order."""
        return self._parts.calls.take()

    def take_block_events(self) -> Sequence[BlockEvent]:
        """Take the changes of the prefix cache since the last call, in order; empty unless `records_blocks`."""
        return self._parts.block_events.take()

    def take_transfer_commands(self) -> Sequence[Command]:
        """Take the commands for the thread that moves KV: with `--disaggregation-mode` or `--kv-disk`.

        Those of a pass are held until all steps before it are settled, because such a step may still write to pages
        that the pass has taken. With up to two pipeline stages a call after each step never has to hold any.
        """
        self._hold_commands(until_step=0)
        ready: list[Command] = []
        while self._held and self._held[0][0] <= self.settled_step:
            ready += self._held.popleft()[1]
        return ready

    def _hold_commands(self, until_step: int) -> None:
        if commands := self._transfer.take_commands():
            self._held.append((until_step, commands))

    def close(self) -> Sequence[Command]:
        """The engine stops in good order: the last commands for the thread that moves KV. No other call follows."""
        self._transfer.close()
        return [*(each for _, held in self._held for each in held), *self._transfer.take_commands()]

    def adapter(self, fingerprint: str) -> Adapter | None:
        """The adapter with this fingerprint; None if it is not loaded."""
        return self._parts.adapters.get(fingerprint)

    def _receive(self, message: GenerateRequest, now_s: float) -> None:
        rid: object = message.rid
        if not isinstance(rid, str):
            logger.error("dropped a request without an answer: its rid is not a string type=%s", type(rid))
            return
        if message.rid in self._requests.by_id:
            # The server makes the rids, so this is a bug of the server. An answer would end the live request's stream.
            logger.error("dropped a request with the rid of a live request rid=%s", message.rid)
            return
        status = 400
        try:
            reason = (
                reason_to_refuse(message, self._capacity)
                or self._parts.adapters.reason_against(message.lora_id)
                or self._reason_against_handoff(message)
            )
        except Exception:  # the failure of one request must not end the others
            logger.error("checking a request failed rid=%s", message.rid, exc_info=True)
            reason, status = "the request could not be checked; the server's log has the cause", 500
        if reason is not None:
            logger.info("refused rid=%s: %s", message.rid, reason)
            self._answers.rows([refusal_row(message, reason, status)])
            return
        if 0.0 < message.arrival_s < self._abandoned_before_s:
            logger.info("dropped a request of an ended tokenizer manager rid=%s", message.rid)
            return
        images = self.media_ids.images_of(message.input_ids, message.media)
        req = self._requests.receive(message, now_s, self._kv.begin_turn(message, now_s), images)
        self._deadlines.add(req, message)
        self.decisions.append(
            Arrived(
                now_s,
                req.rid,
                req.prompt_len,
                req.max_new_tokens,
                req.priority,
                req.tenant,
                req.group,
                message.needs_grammar,
                req.num_delivered,
                req.receives_kv,
                "" if req.session is None else req.session.key,
                req.turn,
                len(message.media),
                req.background,
            )
        )
        if message.grammar is not None and not message.needs_grammar:
            self._guide(req, now_s)
        if req.status in _QUEUED:
            self._note(self._transfer.arrived(req, now_s), now_s)

    def _reason_against_handoff(self, message: GenerateRequest) -> str | None:
        if message.handoff is None:
            return None
        if message.media:
            return (
                "the request has images and a bootstrap room, but images are computed by the engine that decodes; "
                "send it to that engine alone, without bootstrap_room and kv_transfer_params"
            )
        return self._transfer.reason_against(receives=bool(message.handoff.peer)) or None

    def _change(self, changes: Changes, now_s: float) -> None:
        """Send the rows of a `TransferRole` and note what it did."""
        self._note(changes.steps, now_s)
        for call_id, error in changes.flushes:
            self._parts.calls.flushed(call_id, error)
        if changes.rows:
            self._answers.rows([*changes.rows])
            if left := self._requests.take_finished():
                self.decisions.append(Settled(now_s, 0, left=left, grammar_ends=dict(changes.grammar_ends)))

    def _note(self, steps: Sequence[Step], now_s: float) -> None:
        for step in steps:
            self.decisions.append(Handover(now_s, *step))

    def _abandon(self, before_s: float, now_s: float) -> None:
        """End the requests of a tokenizer manager that has ended. Those that still arrive later are dropped."""
        self._abandoned_before_s = before_s
        finish = Finish(FinishKind.ABORT, message="its tokenizer manager has ended")
        if ended := [(req, finish) for req in self._requests.by_id.values() if req.arrival_s < before_s]:
            logger.warning("aborted requests of an ended tokenizer manager requests=%d", len(ended))
            self._end(ended, now_s)

    def _take_grammar(self, message: GrammarReady, now_s: float) -> None:
        req = self._requests.grammar.get(message.rid)
        if req is None:
            return
        if message.error:
            self._end([(req, Finish(FinishKind.ERROR, message=message.error, status=400))], now_s)
        else:
            self._requests.grammar_ready(message.rid, now_s)
            self.decisions.append(Settled(now_s, 0, grammars=[message.rid]))
            if req.grammar_figures is not None:
                req.grammar_figures.compile_s += message.compile_s
                self._guide(req, now_s)
            if req.status in _QUEUED:
                self._note(self._transfer.arrived(req, now_s), now_s)

    def _guide(self, req: Req, now_s: float) -> None:
        """Give a request its matcher, advanced over the tokens that its client has already."""
        try:
            if self._matchers is None:
                raise LookupError(f"{req.rid} has a grammar, but this scheduler has no grammars")
            req.matcher = GuardedMatcher(self._matchers.take(req.rid), req.rid)
        except Exception:  # the failure of one request must not end the others
            logger.error("a request has no matcher rid=%s", req.rid, exc_info=True)
            req.matcher = FailedMatcher()
        if req.grammar is not None:
            assert req.sampling.max_new_tokens is not None
            req.matcher.limit(req.sampling.max_new_tokens)  # also if another engine decodes
        finish = resume(req)
        if finish is not None:
            self._end([(req, finish)], now_s, grammar_ends={req.rid: req.matcher.error})

    def _end_users_of(self, fingerprint: str, error: str, status: int, now_s: float) -> None:
        finish = Finish(FinishKind.ERROR, message=error, status=status)
        users = [req for req in self._requests.by_id.values() if req.lora_id == fingerprint]
        if users:
            self._end([(req, finish) for req in users], now_s)

    def _end(
        self, ended: list[tuple[Req, Finish]], now_s: float, grammar_ends: dict[str, str] | None = None
    ) -> None:
        """End requests between steps; `grammar_ends`: as in `Settled`."""
        num_with_row = sum(req.row >= 0 for req, _ in ended)
        rows = [self._requests.finish(req, finish, now_s) for req, finish in ended]
        self._answers.rows(rows)
        self._note(self._transfer.answered(rows, now_s), now_s)
        if num_with_row:
            self._requests.remove_stopped()
        left = self._requests.take_finished()
        self.decisions.append(Settled(now_s, 0, left=left, grammar_ends=grammar_ends or {}))

    # ------------------------------------------------------------ planning

    def next_batch(self, now_s: float) -> ScheduleBatch | None:
        """Plan the next step. None if there is nothing to do, or nothing before a step in flight is settled.

        A pass that only took memory from running requests is followed by another one at once. When the last request
        has left its row, one IDLE step, without tokens, notifies the runner.
        """
        self._parts.calls.next_pass()
        if expired := self._deadlines.take_expired(now_s):
            self._stats.timed_out_reqs += len(expired)
            self._end(expired, now_s)
        self._kv.expire_pins(now_s)
        self._hold_commands(until_step=0)
        self._change(self._transfer.plan(now_s), now_s)
        # The next step still reads pages that it copies to the host.
        self._hold_commands(until_step=self._last_step_id + self._parts.memory.host.has_outs)
        while True:
            state = PassState(now_s, self._policy.active_name)
            batch = self._plan_pass(state)
            if batch is not None or not state.gave_memory_back:
                return batch  # else memory has come free, and another pass may admit a request

    def _plan_pass(self, state: PassState) -> ScheduleBatch | None:
        """One pass: decide which requests decode and which prompt chunks are computed, and make the batch."""
        evicted_before = self._kv.evicted_pages_total
        self._parts.out_of_memory.report(state)
        work = self._parts.phases.plan(state)
        batch = None
        if work.chunks or work.decode_reqs or self._must_tell_runner(state):
            batch = self._make_batch(work)
        state.notes += self._policy.take_notes()
        # The passes of an idle server are not recorded: they would displace all other records.
        if work.decode_reqs or not state.is_empty:
            self._last_pass = state
            record = record_of(
                state,
                batch,
                num_running=self._requests.num_with_row,
                evicted_pages=self._kv.evicted_pages_total - evicted_before,
                pages=self._kv.page_counts(),
                grammar_drafts=self._parts.grammar_drafts.take_answers(),
            )
            self.decisions.append(record)
            if finished := self._requests.take_finished():
                self.decisions.append(Settled(state.now_s, 0, left=finished))
        return batch

    def _must_tell_runner(self, state: PassState) -> bool:
        """Whether an IDLE step is needed: no request has a row any more, and the runner has not been notified.

        The next step with tokens may be hours away. The IDLE step also carries the planned copies to the host; without
        it swapped requests could not return. After a retraction another pass is tried first.
        """
        none_runs = not self._requests.num_with_row
        memory = self._parts.memory
        return (
            (memory.pool.has_left_rows or memory.host.has_outs) and none_runs and not state.gave_memory_back
        )

    def _make_batch(self, work: Work) -> ScheduleBatch:
        if len(self._parts.adapters):
            work = by_adapter(work, self._parts.memory)
        drafts = self._parts.speculation.plan(work)
        num_rounds = self._parts.multi_step.plan(work, drafts)
        self._last_step_id += 1
        loads = self._parts.adapter_slots.take_loads()
        images = self._parts.encoder_cache.plan(self._last_step_id, work.chunks)
        batch = plan_step(self._last_step_id, work, self._parts.memory, drafts, num_rounds, loads, images)
        for req, pixels in images.pixels.items():
            self._parts.by_class.encoded(req, self._parts.target.tokens_of(pixels))
        if batch.plan.mode is not ForwardMode.IDLE:
            self._stats.num_steps += 1
            self._parts.sentinel.progress()
            self._parts.by_class.planned(
                work.chunks, work.decode_reqs, has_background=self._requests.num_background > 0
            )
        return batch

    # ------------------------------------------------------------ settling

    def settle(
        self,
        batch: ScheduleBatch,
        result: StepResult,
        now_s: float,
        refused: Sequence[RefusedToken] = (),
    ) -> None:
        """Take the result of a step; see `ResultSettler.settle`. Call once per batch, in the order of planning."""
        rows = self._parts.settler.settle(batch, result, now_s, refused)
        self.settled_step = batch.plan.step_id
        self._parts.encoder_cache.settled(
            self.settled_step,
            [batch.reqs[idx] for idx in result.errors],
            out_of_memory=bool(result.out_of_memory),
        )
        self._answers.rows(rows)
        self._transfer.settled(batch, result.forward_s - result.encode_s)
        self.decisions.append(
            Settled(
                now_s,
                result.step_id,
                result.forward_s,
                self._requests.take_finished(),
                result.next_token_ids,
                result.errors,
                result.swap_s,
                out_of_memory=result.out_of_memory,
                num_next_tokens=result.num_next_tokens,
                grammar_ends=ends_by_grammar(batch, rows) if batch.has_grammar else {},
                refused=list(refused),
                vectors={idx: vector_digest(vector) for idx, vector in result.vectors.items()},
                encode_s=result.encode_s,
                draft_s=result.draft_s,
            )
        )
        # After the record of the result: a replay makes this call when it comes to that record.
        self._note(self._transfer.answered(rows, now_s), now_s)

    def needs_result(self, batch: ScheduleBatch) -> bool:
        """Whether a step must be settled before the next one is planned, also with overlap.

        Not with pipeline stages: the requests of a step in flight are not planned again.
        """
        encodes = bool(batch.plan.encodes)  # long against what overlap saves; see `EncoderCache.settled`
        return self.num_stages == 1 and (encodes or self._parts.speculation.needs_result(batch))

    def is_reading(self, store_id: int) -> bool:
        """Whether an adapter's weights are still to be read; False if they are, or if it was refused."""
        return self._parts.adapters.is_reading(store_id)

    def waiting_grammar(self, rid: str) -> GrammarUse | None:
        """The grammars of a request that waits for them; None for any other rid."""
        req = self._requests.grammar.get(rid)
        return None if req is None else req.grammar

    def may_continue(
        self, batch: ScheduleBatch, next_token_ids: bytes, num_rounds: int, seconds: float
    ) -> bool:
        """Whether a multi-step decode may run another inner step; see `MultiStepDecode.may_continue`."""
        return self._parts.multi_step.may_continue(batch, next_token_ids, num_rounds, seconds)

    def rows_still_here(self, batch: ScheduleBatch) -> BoolArray:
        """[B] whether `settle` would keep the tokens of each request: False if the request has left its row since."""
        return batch.still_here(self._parts.memory.pool)

    # ------------------------------------------------------------ idle, and figures

    def wake_s(self) -> float | None:
        """When `next_batch` has something to do without a message; None if never. A time in the past means at once.

        The causes are a deadline, the end of a policy's wait, the next try after the device ran out of memory, and a
        pending `Explain` call.
        """
        if self._parts.calls.has_questions:
            return 0.0
        if not self._requests:
            return self._transfer.wake_s()
        times = [self._deadlines.next_s(), self._transfer.wake_s()]
        if self._parts.pauses.mode is None:
            times.append(self._policy.wake_s(self._requests.waiting))
        if not self._parts.pauses.stops_all:
            times.append(self._parts.out_of_memory.hold_until_s)
        return min((time_s for time_s in times if time_s is not None), default=None)

    def on_idle(self) -> None:
        """Check the scheduler when `next_batch` returned None and no step is in flight.

        Without requests, the page equation must hold with nothing held or locked, and the output estimator is reset.
        With requests that could run, the scheduler is stalled: after a few passes the prefix cache is flushed and the
        estimator reset. If no request can be admitted after that, `report` sets `stalled`.

        Raises:
            LedgerError: pages, locks or rows are missing. A bug.
        """
        sentinel = self._parts.sentinel
        self._parts.calls.nothing_in_flight()
        if not self._requests:
            sentinel.progress()
            self._parts.encoder_cache.check_idle()
            if self._transfer.num_open:
                self._parts.ledger.check()
            else:
                self._parts.ledger.check_idle()
            self._parts.estimator.reset()
            return
        if self._parts.pauses.mode is not None:
            sentinel.progress()
            return
        if self._transfer.num_open:  # each ends at a time limit, of the role or of the link, at the latest
            sentinel.progress()
            return
        if self._parts.out_of_memory.hold_until_s is not None or self._parts.adapters.num_reading:
            sentinel.progress()
            return
        if self._requests.num_with_row:
            raise LedgerError(f"{self._requests.num_with_row} requests run, but no step was planned")
        state = self._last_pass
        assert state is not None, "requests wait, but no pass was made"
        if state.num_waiting == state.num_grammar or self._policy.hold(self._requests.waiting, state.now_s):
            sentinel.progress()
        elif sentinel.no_progress(state):
            self._parts.ledger.check()
            self._kv.flush()
            self._parts.estimator.reset()

    def audit(self) -> None:
        """Check every page, lock, row and adapter slot. For tests: the cost grows with their number.

        Raises:
            LedgerError: the message says what is wrong.
        """
        self._parts.adapter_slots.audit(self._requests.with_row)
        self._parts.encoder_cache.audit(self._requests.with_row)
        self._parts.ledger.audit(self._requests.with_row, self._requests.swapped, self._transfer.leases())

    def report(self, now_s: float) -> SchedulerReport:
        """The current figures, and the totals since the start."""
        return report_of(self._parts, self._capacity, self._last_pass, now_s)
