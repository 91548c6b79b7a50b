"""`TokenizerManager`: from a typed request to scheduler requests, and from rows to the stream that waits for them.

A `GenerationRequest` is verified, admitted, tokenized and sent as one `GenerateRequest` per choice, under ids made
here. The manager has no HTTP and opens no socket: messages leave through `send` and arrive through `on_message`, so
tests drive it with scripted rows.

Its parts share one request log. Everything runs on one event loop; only the tokenization of long prompts leaves it
(`prompt_encoder`).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, assert_never

from msgspec.structs import replace

from ..grammar.compile.compile_queue import CompileQueue
from ..grammar.compile.worker import CompileResult
from ..runtime.config.device_config import DispatchPolicyName
from ..runtime.errors import EngineDeadError, RequestError
from ..runtime.feasibility import Capacity
from ..runtime.grammar_use import GrammarUse
from ..runtime.messages import (
    AbortRequest,
    BatchTextOutput,
    CallDone,
    FinishKind,
    ManagerInput,
    SchedulerInput,
    TextOutput,
)
from ..runtime.sampling_params import SamplingParams
from ..runtime.scheduler_report import SchedulerReport
from .aborter import Aborter, OrphanReaper, error_of
from .control import Control
from .dispatch.dispatcher import Dispatcher
from .dispatch.handoffs import Handoffs, Pair
from .dispatch.policies import make_policy
from .engine_state import EngineState
from .generation import Generation, GenerationRequest, fan_out
from .media.image_store import ImageStore
from .overload.overload_control import OverloadControl, OverloadLimits
from .overload.queue_limiter import QueueLimiter
from .pending_grammars import PendingGrammars
from .preparation import Preparation, PreparedPrompt
from .prompt_encoder import PromptEncoder
from .recovery import Recovery
from .request_log import LoggedRequest, RequestLog
from .telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.1


class TokenizerManager:
    """The open streams of one engine.

    Attributes:
        engine: state of the replicas.
        request_log: the live requests.
        control: calls to the scheduler other than generation.
    """

    def __init__(
        self,
        *,
        encoder: PromptEncoder,
        capacity: Capacity,
        limits: OverloadLimits,
        watchdog_timeout_s: float,
        send: Callable[[SchedulerInput], None],
        metrics: Metrics,
        draw_seed: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        life: int = 0,
        compile_queue: CompileQueue | None = None,
        other_sends: Sequence[Callable[[SchedulerInput], None]] = (),
        dispatch_policy: DispatchPolicyName = "prefix-affinity",
        handoffs: Handoffs | None = None,
        pair: Pair | None = None,
        images: ImageStore | None = None,
    ) -> None:
        """Make a manager without streams.

        Args:
            encoder: tokenizes prompts.
            capacity: of each scheduler.
            limits: on waiting requests.
            watchdog_timeout_s: a scheduler without a report for longer than this is unhealthy.
            send: to the scheduler of the first replica; must not block.
            metrics: counts latencies.
            draw_seed: a seed for a request that has none, in [0, MAX_SEED].
            clock: CLOCK_MONOTONIC.
            life: how many managers this engine had before; late answers to their calls must not match ids of this one.
            compile_queue: compiles new grammars; None: all are trusted.
            other_sends: to the schedulers of further replicas.
            dispatch_policy: chooses among several replicas.
            handoffs: finds the other half of a request; None: no request has one.
            pair: the first replica computes the prompts of the second one; None: all replicas are alike.
            images: gets back the images of generations that have ended; None: there are none.
        """
        sends = [send, *other_sends]
        self.engine = EngineState(capacity, watchdog_timeout_s, clock, len(sends))
        self.request_log = log = RequestLog(self._on_end)
        self._preparation = Preparation(encoder, self.engine)
        self._images = images
        self._handoffs = handoffs if handoffs is not None else Handoffs("null")
        policy = make_policy(dispatch_policy, len(sends), capacity.max_total_tokens)
        self._dispatcher = dispatcher = Dispatcher(sends, policy, self.engine, pair)
        self._send = send = dispatcher.send
        self._metrics = metrics
        metrics.images = images
        self._draw_seed = draw_seed
        self._clock = clock
        self._limiter = QueueLimiter(
            limits.max_queued_requests, len(sends) * capacity.max_running_requests, limits.max_queued_tokens
        )
        self._aborter = Aborter(
            log,
            send=send,
            metrics=metrics,
            queue_timeout_s=limits.queue_timeout_s,
            request_timeout_s=limits.request_timeout_s,
            clock=clock,
        )
        self._overload = OverloadControl(
            limits, self._limiter, log, engine=self.engine, aborter=self._aborter, clock=clock
        )
        self._recovery = Recovery(
            log,
            self.engine,
            limiter=self._limiter,
            aborter=self._aborter,
            metrics=metrics,
            dispatcher=dispatcher,
        )
        self._grammars = PendingGrammars(compile_queue, log, aborter=self._aborter, send=send, clock=clock)
        self._reaper = OrphanReaper(send)
        self.control = Control(send, encoder, self.engine, log, first_id=life << 32)

    @property
    def capacity(self) -> Capacity:
        """The capacity of the smallest scheduler."""
        return self.engine.capacity

    # ------------------------------------------------------------ for the front ends

    def now_s(self) -> float:
        """The time by the manager's clock, which arrivals are stated in."""
        return self._clock()

    async def start(self, request: GenerationRequest) -> Generation:
        """Admit, tokenize and send a request. Enter the result's `with` block before the next await.

        Raises:
            RequestError: the request is refused.
            QueueFullError: the queue is full.
            EngineDeadError: the engine is dead.
        """
        arrival_s = self._clock() if request.arrival_s is None else request.arrival_s
        self.engine.check_accepting()
        self._preparation.check(request)
        async with self._overload.admit(request, arrival_s):
            encoded = await self._preparation.encode(request)
            self.engine.check_accepting()  # it may have changed during tokenization
            encoded, resolved = self._preparation.resolve(request, encoded)
            await self._overload.admit_tokens(request, request.n * sum(map(len, encoded)), arrival_s)
            self.engine.check_accepting()
            return self._open(request, encoded, resolved, arrival_s)

    async def prepare(self, request: GenerationRequest) -> list[PreparedPrompt]:
        """Check and tokenize a request as `start` does, without sending it: a full queue does not matter.

        Raises:
            RequestError: the request is refused.
            QueueFullError: too much text waits to be tokenized.
            EngineDeadError: the engine is dead.
        """
        self.engine.check_accepting()
        self._preparation.check(request)
        self._limiter.check_possible(len(request.prompts) * request.n)
        encoded, resolved = self._preparation.resolve(request, await self._preparation.encode(request))
        use = self._grammars.checked(request.grammar)
        if use is not None and not use.compiles:
            await self._grammars.compile(request, use, self._clock())
        return [PreparedPrompt(*pair) for pair in zip(encoded, resolved, strict=True)]

    def draw_seed(self) -> int:
        """A seed for a request that has none."""
        return self._draw_seed()

    async def measure_grammar(self, use: GrammarUse) -> list[CompileResult]:
        """Compile the grammars of a request that is not sent; see `CompileQueue.compile`."""
        return await self._grammars.measure(use)

    def abort(self, request_id: str | None, reason: str, owner: str | None = None) -> int:
        """Have the scheduler end requests; their streams get finished rows with ABORT.

        Args:
            request_id: of a generation or of one choice, exactly; None for all.
            reason: for the logs.
            owner: only requests of this owner are ended; those of others count as unknown. None for any owner.

        Returns:
            the number of aborted choices.
        """
        live = list(self.request_log) if request_id is None else self.request_log.live(request_id)
        if owner is not None:
            live = [logged for logged in live if logged.generation.scheduling.owner == owner]
        self._deliver_all(self._aborter.abort(live, reason), self._clock())
        return len(live)

    # ------------------------------------------------------------ for the registry of adapters

    def num_users(self, lora_id: str) -> int:
        return sum(logged.message.lora_id == lora_id for logged in self.request_log)

    async def wait_unused(self, lora_id: str) -> None:
        while self.num_users(lora_id):
            await self.request_log.wait_ended()

    def fail_users(self, lora_id: str, message: str) -> None:
        error = RequestError(message, code="adapter_unloaded", status=409)
        users = [logged.generation for logged in self.request_log if logged.message.lora_id == lora_id]
        for generation in users:
            self._aborter.fail(generation, error, message)

    # ------------------------------------------------------------ from the other processes

    def on_message(self, message: ManagerInput) -> None:
        """Take a message of the scheduler or the detokenizer."""
        match message:
            case BatchTextOutput(outputs=outputs):
                self._deliver_all(outputs, self._clock())
            case SchedulerReport():
                self.engine.reported(message)
                self._limiter.reported(self.engine.report or message)
                self._overload.wake_next()
                self._aborter.fail_slow_readers()
            case CallDone():
                self.control.resolve(message)
            case _:
                assert_never(message)

    def check_time(self) -> None:
        """End requests beyond their time limit that no scheduler answers; call this a few times per second."""
        now_s = self._clock()
        self._deliver_all(self._aborter.time_out(now_s), now_s)
        self._recovery.check_time(now_s)

    # ------------------------------------------------------------ lost and restarted processes

    def peers_lost(
        self,
        message: str,
        started: Collection[str] | None = None,
        replica: int = 0,
        restarts_left: int = 0,
    ) -> None:
        """The scheduler or the detokenizer of a replica is lost, to be restarted; see `Recovery` and `PeersLost`."""
        now_s = self._clock()
        self._recovery.lost(message, now_s, started, replica, restarts_left)
        self.control.fail(message)
        self._deliver_all(self._aborter.peers_lost(message), now_s)

    def peers_back(self, capacity: Capacity, restarts_left: int = 0, replica: int = 0) -> None:
        """The processes of a replica run again; the server survives `restarts_left` more losses."""
        self._metrics.num_restarts += 1
        self._recovery.back(capacity, self._clock(), replica, restarts_left)

    # ------------------------------------------------------------ ends of the process

    def drain(self) -> None:
        """Refuse new requests; live ones go on."""
        self.engine.draining = True
        self._overload.close()

    async def wait_idle(self) -> None:
        """Return when no stream is open, and no prompt is on its way to another engine or waits for its claim."""
        await self.request_log.wait_empty()
        while self.engine.is_transferring:
            await asyncio.sleep(_POLL_S)  # reports come every half second

    def abort_all(self, message: str) -> None:
        """End every open stream with a 503 that says `message`, and abort its requests."""
        for generation in list(self.request_log.generations):
            self._aborter.fail(generation, RequestError(message, code="shutting_down", status=503), message)

    def engine_died(self, message: str) -> None:
        """The engine is lost for good: an error for every open stream and every later request."""
        if self.engine.is_dead:
            return
        self.engine.died(message)
        self._overload.close()
        self.control.fail(message)
        for generation in list(self.request_log.generations):
            self._aborter.fail(generation, EngineDeadError(message), message)

    # ------------------------------------------------------------ internals

    def _open(
        self,
        request: GenerationRequest,
        encoded: list[array[int]],
        resolved: list[SamplingParams],
        arrival_s: float,
    ) -> Generation:
        generation_id = request.generation_id or f"{request.id_prefix}-{uuid.uuid4().hex}"
        request = replace(request, grammar=self._grammars.checked(request.grammar))
        bootstrap = request.scheduling.bootstrap
        handoffs = () if bootstrap is None else self._handoffs.of(bootstrap, len(encoded))
        opened = list(
            fan_out(
                request,
                generation_id,
                encoded,
                resolved,
                arrival_s=arrival_s,
                draw_seed=self._draw_seed,
                handoffs=handoffs,
            )
        )
        generation = Generation(
            generation_id,
            [choice for choice, _ in opened],
            request.n,
            arrival_s,
            self._on_reader_gone,
            request,
            self._limiter.num_unstarted,
        )
        if bootstrap is not None and bootstrap.kv_transfer_params is not None and handoffs[0] is not None:
            generation.kv_transfer_params = self._handoffs.answer(handoffs[0])
        generation.opened_s = now_s = self._clock()
        for choice, message in opened:
            logged = LoggedRequest(message, generation, choice)
            self.request_log.opened(logged)
            self._limiter.sent(now_s, len(choice.prompt_ids), background=message.background)
            self._aborter.watch(logged)
            self._submit(logged)
        self._grammars.begin(generation, request)
        return generation

    def _submit(self, logged: LoggedRequest) -> None:
        """Send a new request, or leave it in the log until a replica runs again: then `Recovery` sends it."""
        if self.engine.running:
            logged.send()
            self._dispatcher.submit(logged)

    def _on_end(self, logged: LoggedRequest, now_s: float) -> None:
        """Count the end of a request, then use the room: requests in quarantine and in the queue may go on."""
        media = logged.message.media
        if media and self._images is not None and not self.request_log.choices_of(logged.generation.id):
            self._images.release(item.digest for item in media)
        self._dispatcher.withdraw(logged)
        self._limiter.ended(logged, now_s)
        self._grammars.ended(logged)
        self._recovery.ended(logged, now_s)
        self._overload.wake_next()

    def _deliver_all(self, outputs: Iterable[TextOutput], now_s: float) -> None:
        for output in outputs:
            self._deliver(output, now_s)

    def _deliver(self, output: TextOutput, now_s: float) -> None:
        logged = self.request_log.get(output.rid)
        if logged is None:
            self._reaper.row(output, now_s)  # answered, aborted, or from a lost process
            return
        generation, choice = logged.generation, logged.choice
        if (processed := output.usage.processed_tokens) is not None:
            if processed <= choice.processed_tokens:
                return  # computed again, after a retraction or a crash
            choice.processed_tokens = processed
        waited = choice.first_token_s is None
        self._metrics.row_arrived(generation, choice, output, now_s)
        if waited and choice.first_token_s is not None:
            if not logged.message.background:
                self._limiter.started(len(choice.prompt_ids))
            self._dispatcher.started(logged, output.usage.cached_tokens)
        if output.token_ids:
            logged.delivered_ids += output.token_ids
            logged.usage = output.usage
            if logged.num_crashes:
                self._recovery.progressed(logged, now_s)
        if output.finish is None:
            generation.put(choice, output)
        else:
            self._finish(logged, output, now_s)

    def _finish(self, logged: LoggedRequest, output: TextOutput, now_s: float) -> None:
        """Deliver the last row of a request."""
        finish, generation, choice = output.finish, logged.generation, logged.choice
        assert finish is not None
        if output.ended_by_detokenizer:
            reason = "stop string" if finish.kind is FinishKind.STOP else "failed in the detokenizer"
            self._send(AbortRequest(rid=output.rid, reason=reason))
        self.request_log.ended(logged, now_s)
        if finish.kind is FinishKind.ERROR or (finish.kind is FinishKind.ABORT and not choice.abort_asked):
            # One failed choice fails the request: OpenAI's answer has no place for an error among choices.
            self._aborter.fail(generation, error_of(finish, generation.request, choice, output.rid))
            return
        generation.put(choice, output)

    def _on_reader_gone(self, generation: Generation) -> None:
        self._aborter.drop(generation, "client disconnected")
