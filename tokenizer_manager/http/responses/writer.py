"""`ResponseWriter`: a generation as the events of a response, to its end."""

from __future__ import annotations

import time
import uuid
from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import msgspec
from msgspec.structs import replace

from ...conversation.deltas import Delta
from ...generation import Generation, Row
from ...state.response_store import LiveResponse
from ...state.responses import Response, own_tokens
from ...state.store import StateError
from ..prompt_parts import Comparison, compare
from ..schema.accounting import truncated_of, usage_of
from ..schema.errors import ErrorReply
from ..services import Engine
from .convert import namespaces_of
from .reading import ReadRequest, body_at_beginning
from .stream import ResponseStream
from .wire import (
    InputDetails,
    OutputDetails,
    PromptCacheDiagnostics,
    ResponseBody,
    ResponseError,
    ResponsesUsage,
)

_ABORTED: Final = ResponseError("server_error", "the request was aborted")


class ResponseWriter:
    """Writes the stream of one response.

    Attributes:
        stream: of the events.
    """

    def __init__(
        self, engine: Engine, generation: Generation, read: ReadRequest, stream: ResponseStream | None = None
    ) -> None:
        """Begin, or go on with the stream of a response that has waited."""
        request = read.request
        assert generation.request.conversation is not None
        self._engine = engine
        self._generation = generation
        self._read = read
        self._begun = False
        self._last_events = b""
        self._recent_items = None if request.store is False else engine.recent_items
        options = request.prompt_cache_options
        self._earlier_id = None if options is None else options.comparison_response_id
        self._comparison: Comparison | None = None
        response_id = generation.id.replace("-", "_")
        self.stream = stream or ResponseStream(
            body_at_beginning(engine, generation.request, read, response_id),
            lambda prefix: f"{prefix}_{uuid.uuid4().hex}",
            namespaces_of(generation.request.conversation),
        )
        if self._recent_items is not None or options is not None:
            recent = engine.recent_items
            self._comparison = compare(generation, self.stream.body.id, self._earlier_id, recent)

    def running(self) -> AbstractContextManager[None]:
        """While it is entered, clients find the response as one that runs, if it is to be stored."""
        state = self._engine.state
        if state is None or not self._read.items:
            return nullcontext()
        live = LiveResponse(lambda: msgspec.json.encode(self.stream.snapshot()))
        return state.responses.running(self._generation.scheduling.owner, self.stream.body.id, live)

    def events(self, row: Row, deltas: Sequence[Delta]) -> bytes:
        """The events for a row, after the first ones."""
        begin = b"" if self._begun else self.stream.begin()
        self._begun = True
        return begin + self.stream.events(deltas)

    def complete(self, *, canceled: bool = False) -> bytes:
        """Complete the body; the events before the last one. `canceled`: an abort is what the client has asked for."""
        [choice] = self._generation.choices
        usage = self.usage()
        if choice.finish_reason == "abort":
            if canceled:
                return self.stream.break_off("cancelled", None, usage)
            return self.stream.break_off("failed", _ABORTED, usage)
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

    async def end(self) -> None:
        """Complete the response, and store it, so that it can be continued when its client has it."""
        self._last_events = self.complete()
        body, state = self.stream.body, self._engine.state
        if state is not None and body.store and body.status != "failed":
            try:
                response = self._read.response(body.id, tokens=tokens_of(self._generation))
                await state.responses.add(with_answer(response, body))
            except StateError as error:
                body.store = False
                body.warnings = [*(body.warnings or ()), f"the response was not stored: {error}"]

    def closing(self) -> bytes:
        """The last events, after `end`."""
        return self._last_events + self.stream.last_event()

    def fail(self, reply: ErrorReply) -> bytes:
        """The last events of a stream that fails."""
        return self.stream.break_off("failed", error_of(reply), self.usage()) + self.stream.last_event()

    def usage(self) -> ResponsesUsage:
        """The counts of tokens so far."""
        generation, engine = self._generation, self._engine
        usage = usage_of(generation, tokenizer=engine.tokenizer)
        return ResponsesUsage(
            usage.prompt_tokens,
            InputDetails(usage.prompt_tokens_details.cached_tokens, engine.num_written_tokens(generation)),
            usage.completion_tokens,
            OutputDetails(generation.reasoning_tokens() or 0),
            usage.total_tokens,
            usage.grammar,
        )


def error_of(reply: ErrorReply) -> ResponseError:
    """The error of a failed response."""
    code = "rate_limit_exceeded" if reply.status == 429 else "server_error"
    return ResponseError(code, reply.body.error.message)


def tokens_of(generation: Generation) -> bytes:
    """`Response.tokens` at its end; b"" with images, whose tokens stand for pixels, and without an answer."""
    request, [choice] = generation.request, generation.choices
    if request.media or request.warm_up:
        return b""
    return own_tokens(choice.prompt_ids + array("i", choice.answer_ids), request.earlier_ids)


def with_answer(response: Response, body: ResponseBody) -> Response:
    """A response with its answer, as it is stored."""
    output = msgspec.json.encode(body.output)
    return response._replace(
        status=body.status,
        output=output,
        body=msgspec.json.encode(replace(body, output=[])),
        chain_bytes=response.chain_bytes + len(output),
        resume=b"",
    )


def _diagnostics(comparison: Comparison | None, cached_tokens: int, page_size: int) -> PromptCacheDiagnostics:
    if comparison is None:
        return PromptCacheDiagnostics(type="comparison_response_not_found")
    if comparison.changed:
        part = comparison.changed if comparison.changed in ("model", "tools") else "input"
        missed = comparison.missed_tokens(cached_tokens)
        return PromptCacheDiagnostics(type="cache_miss", reason=f"{part}_changed", cache_missed_tokens=missed)
    reused = comparison.is_reused(cached_tokens, page_size)
    return PromptCacheDiagnostics(type="cache_hit" if reused else "unavailable")
