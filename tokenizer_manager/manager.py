"""`TokenizerManager`: from a typed request to scheduler requests, and from rows back to the stream that waits.

It owns every open stream, the request log and the door: a `GenerationRequest` is verified, tokenised, admitted and
sent as one `GenerateRequest` per choice, under ids made here. It knows nothing of HTTP and opens no socket: messages
go out through `send` and come in through `on_message`, so tests drive it with scripted rows.

Everything runs on one event loop; only tokenising of long prompts leaves it (`prompt_encoder`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from array import array
from collections.abc import Callable
from typing import Final, assert_never

import msgspec

from ..runtime.errors import EngineDeadError, RequestError
from ..runtime.feasibility import Capacity
from ..runtime.messages import (
    AbortRequest,
    BatchTextOutput,
    Explanation,
    FinishKind,
    FlushCache,
    FlushCacheDone,
    GenerateRequest,
    ManagerInput,
    PinDone,
    SchedulerInput,
    SchedulerReport,
    TextOutput,
)
from ..runtime.sampling_params import MAX_SEED, SamplingParams
from .admission import QueueGate, check_may_fit, resolve_length
from .generation import Choice, Generation, GenerationRequest
from .metrics import Metrics
from .prompt_encoder import PromptEncoder, prompt_name
from .request_log import RequestLog

logger = logging.getLogger(__name__)

_FLUSH_TIMEOUT_S: Final = 10.0


class TokenizerManager:
    """The open streams of one engine.

    Attributes:
        capacity: of the scheduler.
        request_log: the live requests.
        report: the scheduler's latest; None before the first.
        draining: no new requests are taken.
    """

    def __init__(
        self,
        *,
        encoder: PromptEncoder,
        capacity: Capacity,
        max_queued_requests: int,
        watchdog_timeout_s: float,
        send: Callable[[SchedulerInput], None],
        metrics: Metrics,
        draw_seed: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a manager without streams.

        Args:
            encoder: tokenises prompts.
            capacity: of the scheduler.
            max_queued_requests: over it, new requests are refused with 429.
            watchdog_timeout_s: a scheduler silent for longer is not healthy.
            send: to the scheduler; must not block.
            metrics: where latencies are counted.
            draw_seed: a seed for a request that brings none, in [0, MAX_SEED].
            clock: CLOCK_MONOTONIC.
        """
        self.capacity = capacity
        self.request_log = RequestLog()
        self.report: SchedulerReport | None = None
        self.draining = False
        self._encoder = encoder
        self._gate = QueueGate(max_queued_requests, capacity.max_running_requests)
        self._watchdog_timeout_s = watchdog_timeout_s
        self._send = send
        self._metrics = metrics
        self._draw_seed = draw_seed
        self._clock = clock
        self._started_s = (
            clock()
        )  # the scheduler has just told its capacity, which counts as its first heartbeat
        self._death: str | None = None  # not the error: raising one object twice keeps every traceback alive
        self._live: dict[str, tuple[Generation, Choice]] = {}
        self._generations: dict[str, Generation] = {}
        self._flushes: dict[int, asyncio.Future[FlushCacheDone]] = {}
        self._num_flushes = 0
        self._idle = asyncio.Event()
        self._idle.set()

    # ------------------------------------------------------------ for the front ends

    async def start(self, request: GenerationRequest) -> Generation:
        """Tokenise, admit and send a request; enter the result's `with` block without awaiting anything before.

        Raises:
            RequestError: the request is refused.
            QueueFullError: too many wait.
            EngineDeadError: there is no engine any more.
        """
        arrival_s = self._clock()
        self._check_open()
        request.sampling.verify(self.capacity.vocab_size)
        num_choices = len(request.prompts) * request.n
        gate = self._gate.hold(num_choices, len(self._live), self._clock())
        with contextlib.nullcontext() if request.probe else gate:
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
            return self._open(request, encoded, resolved, arrival_s)

    def abort(self, request_id: str | None, reason: str) -> int:
        """Have the scheduler end requests; their streams get finished rows with ABORT.

        Args:
            request_id: of a generation or of one choice, exactly; None: all.
            reason: for the logs.

        Returns:
            how many choices are concerned.
        """
        if request_id is None:
            rids = list(self._live)
        elif (generation := self._generations.get(request_id)) is not None:
            rids = [choice.rid for choice in generation.choices if choice.rid in self._live]
        else:
            rids = [request_id] if request_id in self._live else []
        for rid in rids:
            self._live[rid][1].abort_asked = True
            self._send(AbortRequest(rid=rid, reason=reason))
        return len(rids)

    async def flush_cache(self) -> FlushCacheDone:
        """Drop what the prefix cache can drop.

        Raises:
            EngineDeadError: the scheduler does not answer.
        """
        if self._death is not None:
            raise EngineDeadError(self._death)
        self._num_flushes += 1
        flush_id = self._num_flushes
        answer: asyncio.Future[FlushCacheDone] = asyncio.get_running_loop().create_future()
        self._flushes[flush_id] = answer
        self._send(FlushCache(flush_id=flush_id))
        try:
            async with asyncio.timeout(_FLUSH_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise EngineDeadError(f"the scheduler did not answer within {_FLUSH_TIMEOUT_S:g} s") from None
        finally:
            del self._flushes[flush_id]

    def unhealthy_reason(self) -> str | None:
        """Why requests should go elsewhere now; None if all is well."""
        if self._death is not None:
            return self._death
        if self.draining:
            return "the server is shutting down"
        age_s = self._clock() - (self._started_s if self.report is None else self.report.sent_s)
        if age_s > self._watchdog_timeout_s:
            return f"the scheduler's last heartbeat is {age_s:.1f} s old, the limit is {self._watchdog_timeout_s:g} s"
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
            case FlushCacheDone():
                answer = self._flushes.get(message.flush_id)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case PinDone() | Explanation():
                pass
            case _:
                assert_never(message)

    # ------------------------------------------------------------ ends of the process

    def drain(self) -> None:
        """Take no new requests; those that run go on."""
        self.draining = True

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
        for answer in self._flushes.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(message))
        for generation in list(self._generations.values()):
            generation.fail(EngineDeadError(message))
            self._abort_rest(generation, message)

    # ------------------------------------------------------------ internals

    def _check_open(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)
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
        choices: list[Choice] = []
        messages: list[GenerateRequest] = []
        for ids, sampling in zip(encoded, resolved, strict=True):
            seed = sampling.seed if sampling.seed is not None else self._draw_seed()
            input_ids = ids.tobytes()  # one copy for all n
            for i in range(request.n):
                choice = Choice(f"{generation_id}-{len(choices)}", len(choices), ids, (seed + i) & MAX_SEED)
                choices.append(choice)
                messages.append(
                    GenerateRequest(
                        rid=choice.rid,
                        input_ids=input_ids,
                        sampling=msgspec.structs.replace(sampling, seed=choice.seed),
                        arrival_s=arrival_s,
                        priority=request.priority,
                        extra_key=request.extra_key,
                        tenant=request.tenant,
                    )
                )
        generation = Generation(generation_id, choices, request.n, arrival_s, self._on_reader_gone)
        self._generations[generation_id] = generation
        self._idle.clear()
        now_s = self._clock()
        for choice, message in zip(choices, messages, strict=True):
            self._live[choice.rid] = (generation, choice)
            self.request_log.add(message)
            self._gate.sent(now_s)
            self._send(message)
        return generation

    def _deliver(self, output: TextOutput, now_s: float) -> None:
        entry = self._live.get(output.rid)
        if entry is None:
            return  # answered or aborted already: late rows are expected
        generation, choice = entry
        self._observe(generation, choice, output, now_s)
        if output.token_ids:
            self.request_log.deliver(output.rid, output.token_ids)
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
            generation.fail(RequestError(message, code="generation_failed", status=finish.status))
            self._abort_rest(generation, "another choice of the request failed")
            return
        generation.put(choice, output)
        if generation.finished:
            self._retire(generation)

    def _observe(self, generation: Generation, choice: Choice, output: TextOutput, now_s: float) -> None:
        num_tokens = len(output.token_ids) // 4
        if num_tokens:
            if choice.last_token_s is None:
                choice.first_token_s = now_s
                self._metrics.time_to_first_token.observe(now_s - generation.arrival_s)
                self._metrics.queue_time.observe(output.usage.queue_s)
            else:
                gap_s = (now_s - choice.last_token_s) / num_tokens
                self._metrics.inter_token_latency.observe(gap_s, num_tokens)
            choice.last_token_s = now_s
        if output.finish is not None:
            self._metrics.finished_reqs.add(output.finish.kind.value)
            if output.finish.kind in (FinishKind.STOP, FinishKind.LENGTH):
                self._metrics.e2e_request_latency.observe(now_s - generation.arrival_s)

    def _on_reader_gone(self, generation: Generation) -> None:
        self._abort_rest(generation, "client disconnected")

    def _abort_rest(self, generation: Generation, reason: str) -> None:
        """Abort what still runs of a generation that nobody reads any more."""
        now_s = self._clock()
        for choice in generation.choices:
            if choice.rid in self._live:
                # First the message, then the state: nothing may be forgotten whose abort was not sent.
                self._send(AbortRequest(rid=choice.rid, reason=reason))
                self._metrics.finished_reqs.add("dropped")
                self._forget(choice.rid, now_s)
        self._retire(generation)

    def _forget(self, rid: str, now_s: float) -> None:
        del self._live[rid]
        self.request_log.remove(rid)
        self._gate.finished(now_s)

    def _retire(self, generation: Generation) -> None:
        self._generations.pop(generation.id, None)
        if not self._generations:
            self._idle.set()
