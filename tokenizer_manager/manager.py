"""`TokenizerManager`: from a typed request to scheduler requests, and from rows back to the stream that waits.

It owns every open stream, the request log and the door: a `GenerationRequest` is verified, tokenised, admitted and
sent as one `GenerateRequest` per choice, under ids made here. It knows nothing of HTTP and opens no socket: messages
go out through `send` and come in through `on_message`, so tests drive it with scripted rows.

Everything runs on one event loop; only tokenising of long prompts leaves it (`prompt_encoder`).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from array import array
from collections.abc import Callable, Collection
from typing import Final, assert_never

from ..runtime.errors import EngineDeadError, RequestError
from ..runtime.feasibility import Capacity
from ..runtime.messages import (
    AbortRequest,
    BatchTextOutput,
    Explanation,
    FinishKind,
    FlushCacheDone,
    ManagerInput,
    PinDone,
    RequestList,
    SchedulerInput,
    SchedulerReport,
    TextOutput,
)
from ..runtime.sampling_params import SamplingParams
from .admission.feasibility_check import check_may_fit, resolve_length
from .admission.overload_control import Door, DoorLimits
from .control import Control
from .early_ends import EarlyEnds
from .generation import Choice, Generation, GenerationRequest
from .metrics import Metrics
from .opening import scheduler_requests
from .orphan_reaper import Sweep
from .prompt_encoder import PromptEncoder, prompt_name
from .questions import Questions
from .recovery import Recovery
from .request_log import LoggedRequest, RequestLog
from .time_limits import TimeLimits

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S: Final = 10.0
_TIMEOUT_CODES: Final = {503: "queue_timeout", 504: "request_timeout"}
"""What the scheduler's error status says about a request that ran out of time."""


class TokenizerManager:
    """The open streams of one engine.

    Attributes:
        capacity: of the scheduler.
        request_log: the live requests.
        control: questions and orders that are no generation.
        report: the scheduler's latest; None before the first.
        draining: no new requests are taken.
    """

    def __init__(
        self,
        *,
        encoder: PromptEncoder,
        capacity: Capacity,
        limits: DoorLimits,
        watchdog_timeout_s: float,
        send: Callable[[SchedulerInput], None],
        metrics: Metrics,
        draw_seed: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        life: int = 0,
    ) -> None:
        """Make a manager without streams.

        Args:
            encoder: tokenises prompts.
            capacity: of the scheduler.
            limits: how much may wait.
            watchdog_timeout_s: a scheduler silent for longer is not healthy.
            send: to the scheduler; must not block.
            metrics: where latencies are counted.
            draw_seed: a seed for a request that brings none, in [0, MAX_SEED].
            clock: CLOCK_MONOTONIC.
            life: how many managers this engine has had before; answers to their questions are none to ours.
        """
        self.capacity = capacity
        self.request_log = RequestLog()
        self.report: SchedulerReport | None = None
        self.draining = False
        self._encoder = encoder
        self._watchdog_timeout_s = watchdog_timeout_s
        self._send = send
        self._metrics = metrics
        self._draw_seed = draw_seed
        self._clock = clock
        self._started_s = (
            clock()
        )  # the scheduler has just told its capacity, which counts as its first heartbeat
        self._death: str | None = None  # not the error: raising one object twice keeps every traceback alive
        self._generations: dict[str, Generation] = {}
        self._door = Door(
            limits,
            capacity.max_running_requests,
            generations=self._generations.values,
            num_live=lambda: len(self.request_log),
            send_away=self._send_away,
            check_open=self._check_open,
            clock=clock,
        )
        self._gate = self._door.gate
        self._questions = Questions(send, _ANSWER_TIMEOUT_S, first_id=life << 32)
        self.control = Control(
            self._questions,
            encoder,
            capacity=lambda: self.capacity,
            check_answering=self._check_answering,
            first_choice=self._first_choice,
        )
        self._recovery = Recovery(
            self.request_log, gate=self._gate, metrics=metrics, send=send, fail=self._fail
        )
        self._sweep = Sweep(send, self._fail)
        self._early_ends = EarlyEnds(
            self.request_log,
            TimeLimits(self.request_log, limits.queue_timeout_s, limits.request_timeout_s),
            send=send,
            deliver=self._deliver,
        )
        self._idle = asyncio.Event()
        self._idle.set()

    # ------------------------------------------------------------ for the front ends

    def now_s(self) -> float:
        """The time by the manager's clock, which arrivals are stated in."""
        return self._clock()

    async def start(self, request: GenerationRequest) -> Generation:
        """Tokenise, admit and send a request; enter the result's `with` block without awaiting anything before.

        Raises:
            RequestError: the request is refused.
            QueueFullError: too many wait.
            EngineDeadError: there is no engine any more.
        """
        arrival_s = self._clock() if request.arrival_s is None else request.arrival_s
        self._check_open()
        request.sampling.verify(self.capacity.vocab_size)
        async with self._door.places_for(request, arrival_s):
            encoded = await self._encode(request)
            self._check_open()  # it may have changed while we tokenised
            resolved = [
                resolve_length(
                    request.sampling,
                    len(ids),
                    self.capacity,
                    prompt_param=prompt_name(request.prompts, i, request.prompt_param),
                    length_param=request.length_param,
                )
                for i, ids in enumerate(encoded)
            ]
            await self._door.room_for_tokens(request, request.n * sum(map(len, encoded)), arrival_s)
            self._check_open()
            return self._open(request, encoded, resolved, arrival_s)

    def abort(self, request_id: str | None, reason: str, owner: str | None = None) -> int:
        """Have the scheduler end requests; their streams get finished rows with ABORT.

        Args:
            request_id: of a generation or of one choice, exactly; None: all.
            reason: for the logs.
            owner: whose requests may be ended; those of others are as good as unknown. None: everybody's.

        Returns:
            how many choices are concerned.
        """
        choices = self._choices_of(request_id) if request_id is not None else self._all_choices()
        live = [logged for choice in choices if (logged := self.request_log.get(choice.rid)) is not None]
        if owner is not None:
            live = [logged for logged in live if logged.generation.scheduling.owner == owner]
        self._early_ends.abort(live, reason, self._clock())
        return len(live)

    def ttft_s(self, rid: str) -> float | None:
        """Seconds from the arrival of a live request to its first token; None if there is none yet."""
        logged = self.request_log.get(rid)
        if logged is None or logged.choice.first_token_s is None:
            return None
        return logged.choice.first_token_s - logged.generation.arrival_s

    def unhealthy_reason(self) -> str | None:
        """Why requests should go elsewhere now; None if all is well."""
        if self._death is not None:
            return self._death
        if self.draining:
            return "the server is shutting down"
        if self._recovery.reason is not None:
            return self._recovery.reason
        # What was said before the last loss is no heartbeat of those that live now.
        report = self.report if self.report is not None and self.report.sent_s >= self._started_s else None
        age_s = self._clock() - (self._started_s if report is None else report.sent_s)
        if age_s > self._watchdog_timeout_s:
            return f"the scheduler's last heartbeat is {age_s:.1f} s old, the limit is {self._watchdog_timeout_s:g} s"
        if report is not None and report.stalled:
            return f"requests wait and nothing moves: {report.stalled}"
        return None

    # ------------------------------------------------------------ from the other processes

    def on_message(self, message: ManagerInput) -> None:
        """Take what the detokenizer sent."""
        match message:
            case BatchTextOutput(outputs=outputs):
                now_s = self._clock()
                for output in outputs:
                    self._deliver(output, now_s)
            case SchedulerReport():
                self.report = message
                self._gate.reported(message)
                self._door.may_have_room()
                self._sweep.slow_readers(self._generations.values())
            case FlushCacheDone():
                self._questions.answered(message.flush_id, message)
            case PinDone():
                self._questions.answered(message.pin_id, message)
            case Explanation():
                self._questions.answered(message.explain_id, message)
            case RequestList():
                self._questions.answered(message.list_id, message)
            case _:
                assert_never(message)

    def check_time(self) -> None:
        """Answer the requests whose time is over and whom nobody else answers; called a few times per second."""
        now_s = self._clock()
        self._early_ends.check_time(now_s)
        self._recovery.check_time(now_s)

    # ------------------------------------------------------------ lost and restarted processes

    def peers_lost(self, message: str, started: Collection[str] | None = None) -> None:
        """The scheduler or the detokenizer is gone, and will be back; see `Recovery` and `PeersLost`."""
        now_s = self._clock()
        self._recovery.lost(message, now_s, started)
        self._questions.fail(message)
        self._early_ends.lost(message, now_s)

    def peers_back(self, capacity: Capacity, restarts_left: int = 0) -> None:
        """There is a scheduler and a detokenizer again, and so many more losses are survived."""
        self.capacity = capacity
        self._started_s = self._clock()
        self._recovery.back(self._started_s, restarts_left)

    # ------------------------------------------------------------ ends of the process

    def drain(self) -> None:
        """Take no new requests; those that run go on."""
        self.draining = True
        self._door.close()

    async def wait_idle(self) -> None:
        """Return when no stream is open."""
        await self._idle.wait()

    def abort_all(self, message: str) -> None:
        """End every open stream with a 503 that says `message`, and its requests in the scheduler."""
        for generation in list(self._generations.values()):
            generation.fail(RequestError(message, code="shutting_down", status=503))
            self._abort_rest(generation, message)

    def engine_died(self, message: str) -> None:
        """The engine is gone for good: an error for every open stream and every later request."""
        if self._death is not None:
            return
        self._death = message
        self._door.close()
        self._questions.fail(message)
        for generation in list(self._generations.values()):
            generation.fail(EngineDeadError(message))
            self._abort_rest(generation, message)

    # ------------------------------------------------------------ internals

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)

    def _check_answering(self) -> None:
        self._check_alive()
        if self._recovery.reason is not None:
            raise EngineDeadError(self._recovery.reason)

    def _all_choices(self) -> list[Choice]:
        return [logged.choice for logged in self.request_log]

    def _choices_of(self, request_id: str) -> list[Choice]:
        """Those of a generation, or (as its client knows it, `<generation>-<index>`) one of them."""
        if (generation := self._generations.get(request_id)) is not None:
            return generation.choices
        generation_id, _, index = request_id.rpartition("-")
        generation = self._generations.get(generation_id)
        return [] if generation is None else [c for c in generation.choices if str(c.index) == index]

    def _first_choice(self, request_id: str) -> str | None:
        choices = self._choices_of(request_id)
        return choices[0].rid if choices else None

    def _check_open(self) -> None:
        self._check_alive()
        if self.draining:
            raise RequestError(
                "the server is shutting down; retry elsewhere", code="shutting_down", status=503
            )

    async def _encode(self, request: GenerationRequest) -> list[array[int]]:
        for i, prompt in enumerate(request.prompts):
            if isinstance(prompt, str):
                name = prompt_name(request.prompts, i, request.prompt_param)
                check_may_fit(prompt, self._encoder.tokenizer, self.capacity, name)
        return await self._encoder.encode(
            request.prompts, add_special_tokens=request.add_special_tokens, param=request.prompt_param
        )

    def _open(
        self,
        request: GenerationRequest,
        encoded: list[array[int]],
        resolved: list[SamplingParams],
        arrival_s: float,
    ) -> Generation:
        generation_id = f"{request.id_prefix}-{uuid.uuid4().hex}"
        opened = list(
            scheduler_requests(
                request, generation_id, encoded, resolved, arrival_s=arrival_s, draw_seed=self._draw_seed
            )
        )
        generation = Generation(
            generation_id,
            [choice for choice, _ in opened],
            request.n,
            arrival_s,
            self._on_reader_gone,
            request.scheduling,
            self._gate.num_unstarted,
        )
        self._generations[generation_id] = generation
        self._idle.clear()
        now_s = self._clock()
        for choice, message in opened:
            logged = LoggedRequest(message, generation, choice)
            self.request_log.add(logged)
            self._early_ends.add(logged)
            self._gate.sent(now_s, len(choice.prompt_ids))
            self._recovery.submit_new(logged)
        return generation

    def _deliver(self, output: TextOutput, now_s: float) -> None:
        logged = self.request_log.get(output.rid)
        if logged is None:
            self._sweep.stray(output, now_s)  # answered, aborted, or from a lost process: some late rows come
            return
        generation, choice = logged.generation, logged.choice
        waited = choice.first_token_s is None
        self._metrics.row_arrived(generation, choice, output, now_s)
        if waited and choice.first_token_s is not None:
            self._gate.started(len(choice.prompt_ids))
        if output.token_ids:
            logged.delivered_ids += output.token_ids
            logged.usage = output.usage
            if logged.num_strikes:
                self._recovery.progressed(logged, now_s)
        finish = output.finish
        if finish is None:
            generation.put(choice, output)
            return
        if output.ended_by_detokenizer:
            reason = "stop string" if finish.kind is FinishKind.STOP else "failed in the detokenizer"
            self._send(AbortRequest(rid=output.rid, reason=reason))
        self._forget(choice.rid, now_s)
        if finish.kind is FinishKind.ERROR or (finish.kind is FinishKind.ABORT and not choice.abort_asked):
            # One failed choice fails the request: OpenAI's answer has no place for an error among choices.
            message = finish.message or f"the engine ended the request ({finish.kind.value})"
            logger.warning("request failed rid=%s status=%d error=%s", output.rid, finish.status, message)
            code = _TIMEOUT_CODES.get(finish.status, "generation_failed")
            self._fail(generation, RequestError(message, code=code, status=finish.status))
            return
        generation.put(choice, output)
        if generation.finished:
            self._retire(generation)

    def _fail(
        self,
        generation: Generation,
        error: RequestError,
        reason: str = "another choice of the request failed",
    ) -> None:
        generation.fail(error)
        self._abort_rest(generation, reason)

    def _on_reader_gone(self, generation: Generation) -> None:
        self._abort_rest(generation, "client disconnected")

    def _abort_rest(self, generation: Generation, reason: str) -> None:
        """Abort what still runs of a generation that nobody reads any more."""
        now_s = self._clock()
        for choice in generation.choices:
            if choice.rid in self.request_log:
                # First the message, then the state: nothing may be forgotten whose abort was not sent.
                self._send(AbortRequest(rid=choice.rid, reason=reason))
                self._metrics.finished_reqs.add("dropped")
                self._forget(choice.rid, now_s)
        self._retire(generation)

    def _forget(self, rid: str, now_s: float) -> None:
        logged = self.request_log.remove(rid)
        if logged.choice.first_token_s is None:
            self._gate.started(len(logged.choice.prompt_ids))
        self._recovery.ended(logged, now_s)
        self._gate.finished(now_s)
        self._door.may_have_room()

    def _send_away(self, generation: Generation, error: RequestError) -> None:
        self._fail(generation, error, "made room for a more urgent request")

    def _retire(self, generation: Generation) -> None:
        self._generations.pop(generation.id, None)
        if not self._generations:
            self._idle.set()
