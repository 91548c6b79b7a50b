"""`POST /v1/responses` and `POST /v1/responses/input_tokens`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, Final

from msgspec import UNSET
from msgspec.structs import replace

from ...conversation.deltas import Delta
from ...generation import Generation, GenerationRequest, Row
from ..delivery import collect_deltas, stream
from ..exchange import Exchange
from ..guards.auth import Caller
from ..prompt_parts import Comparison, compare
from ..schema.accounting import truncated_of, usage_of
from ..schema.errors import ErrorReply
from ..services import Engine
from .convert import namespaces_of, read_responses
from .stream import ResponseStream
from .wire import (
    InputDetails,
    InputTokensBody,
    OutputDetails,
    PromptCacheDiagnostics,
    ResponseBody,
    ResponseError,
    ResponsesRequest,
    ResponsesUsage,
)

_ABORTED: Final = ResponseError("server_error", "the request was aborted")


async def responses(exchange: Exchange, engine: Engine) -> None:
    """Answer a chat in the form of the Responses API."""
    body, request = await engine.read(exchange, lambda body: _read(body, engine, exchange.caller))
    async with exchange.abort_on_disconnect():
        with await engine.start(exchange, request) as generation:
            writer = _Writer(engine, generation, body)
            if body.stream:
                exchange.failure_event = writer.fail
                await stream(exchange, generation, writer)
            else:
                writer.stream.events(await collect_deltas(generation))
                writer.closing()
                await exchange.send_json(writer.stream.body)


async def response_input_tokens(exchange: Exchange, engine: Engine) -> None:
    """The number of tokens of the prompt of a response."""
    _, request = await engine.read(exchange, lambda body: _read(body, engine, exchange.caller))
    async with exchange.abort_on_disconnect():
        num_tokens, warnings = await engine.count_prompt(exchange, request)
        await exchange.send_json(InputTokensBody(input_tokens=num_tokens, warnings=warnings or UNSET))


def _read(body: dict[str, Any], engine: Engine, caller: Caller) -> tuple[ResponsesRequest, GenerationRequest]:
    request, generation = read_responses(
        body,
        engine.config,
        engine.sampling_defaults,
        lambda item: engine.recent_items.find(item, caller.owner),
        sees_images=engine.images.are_seen,
    )
    engine.check_model(request.model)
    request.input = []  # the conversation has them; an answer may take long, and images are megabytes
    scheduling = engine.with_adapter(caller.scheduling(request, body=body), request.model)
    return request, replace(generation, scheduling=scheduling)


class _Writer:
    """Writes the stream of one response.

    Attributes:
        stream: of the events.
    """

    def __init__(self, engine: Engine, generation: Generation, request: ResponsesRequest) -> None:
        assert generation.request.conversation is not None
        self._engine = engine
        self._generation = generation
        self._begun = False
        self._recent_items = None if request.store is False else engine.recent_items
        options = request.prompt_cache_options
        self._earlier_id = None if options is None else options.comparison_response_id
        self._comparison: Comparison | None = None
        if self._recent_items is not None or options is not None:
            response_id = generation.id.replace("-", "_")
            self._comparison = compare(generation, response_id, self._earlier_id, engine.recent_items)
        self.stream = ResponseStream(
            _body(engine, generation, request),
            lambda prefix: f"{prefix}_{uuid.uuid4().hex}",
            namespaces_of(generation.request.conversation),
        )

    def events(self, row: Row, deltas: Sequence[Delta]) -> bytes:
        """The events for a row, after the first ones."""
        begin = b"" if self._begun else self.stream.begin()
        self._begun = True
        return begin + self.stream.events(deltas)

    def closing(self) -> bytes:
        """The last events."""
        [choice] = self._generation.choices
        usage = _usage(self._generation, self._engine)
        if choice.finish_reason == "abort":
            return self.stream.fail(_ABORTED, usage)
        self.stream.body.truncated = truncated_of(choice, self._engine.tokenizer)
        if self._earlier_id:
            page_size = self._engine.manager.capacity.page_size
            self.stream.body.prompt_cache_diagnostics = _diagnostics(
                self._comparison, choice.usage.cached_tokens, page_size
            )
        events = self.stream.complete(
            None if choice.warm_up else choice.finish_reason, usage, int(time.time())
        )
        if self._recent_items is not None:
            self._recent_items.keep(self.stream.body.output, self._generation.scheduling.owner)
        return events

    def fail(self, reply: ErrorReply) -> bytes:
        """The last events of a stream that fails."""
        error = reply.body.error
        code = "rate_limit_exceeded" if reply.status == 429 else "server_error"
        usage = _usage(self._generation, self._engine)
        return self.stream.fail(ResponseError(code, error.message), usage)


def _diagnostics(comparison: Comparison | None, cached_tokens: int, page_size: int) -> PromptCacheDiagnostics:
    if comparison is None:
        return PromptCacheDiagnostics(type="comparison_response_not_found")
    if comparison.changed:
        part = comparison.changed if comparison.changed in ("model", "tools") else "input"
        missed = comparison.missed_tokens(cached_tokens)
        return PromptCacheDiagnostics(type="cache_miss", reason=f"{part}_changed", cache_missed_tokens=missed)
    reused = comparison.is_reused(cached_tokens, page_size)
    return PromptCacheDiagnostics(type="cache_hit" if reused else "unavailable")


def _body(engine: Engine, generation: Generation, request: ResponsesRequest) -> ResponseBody:
    """The response at its beginning, with the request's settings."""
    sampling = generation.request.sampling
    reasoning = request.reasoning or {}
    text = request.text or {}
    return ResponseBody(
        id=generation.id.replace("-", "_"),
        created_at=int(time.time()),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        model=generation.scheduling.served_as or engine.served_model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning={"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        temperature=sampling.temperature,
        text={"format": text.get("format") or {"type": "text"}},
        tool_choice="auto" if request.tool_choice is None else request.tool_choice,
        tools=request.tools or [],
        top_p=sampling.top_p,
        user=request.user or UNSET,
        metadata=request.metadata or {},
        warnings=generation.request.warnings or UNSET,
    )


def _usage(generation: Generation, engine: Engine) -> ResponsesUsage:
    usage = usage_of(generation, tokenizer=engine.tokenizer)
    return ResponsesUsage(
        usage.prompt_tokens,
        InputDetails(usage.prompt_tokens_details.cached_tokens, engine.num_written_tokens(generation)),
        usage.completion_tokens,
        OutputDetails(generation.reasoning_tokens() or 0),
        usage.total_tokens,
        usage.grammar,
    )
