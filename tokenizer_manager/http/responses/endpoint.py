"""`POST /v1/responses` and `POST /v1/responses/input_tokens`."""

from __future__ import annotations

import time
import uuid
from typing import Any, Final

from msgspec import UNSET

from ...conversation.deltas import Delta, merged
from ..chat_run import AnswerRow, ChatCall, ChatGeneration, send_stream, start_chat
from ..exchange import Exchange
from ..schema.accounting import truncated_of, usage_of
from ..schema.errors import ErrorReply
from ..schema.field_policy import first_warnings
from ..services import Services
from .convert import LENGTH_PARAM, NAMES, ReadResponses, ResponseStream, read_responses
from .wire import (
    InputDetails,
    InputTokensBody,
    OutputDetails,
    ResponseBody,
    ResponseError,
    ResponsesUsage,
)

_ABORTED: Final = ResponseError("server_error", "the request was aborted")


async def responses(exchange: Exchange, services: Services) -> None:
    """Answer a chat in the form of the Responses API."""
    read = await services.read(exchange, lambda body: _read(body, services))
    request = read.request
    scheduling = services.with_adapter(exchange.caller.scheduling(request), request.model)
    constraint = read.constraint
    call = ChatCall(
        conversation=read.conversation,
        sampling=read.sampling,
        id_prefix="resp",
        scheduling=scheduling,
        length_param=LENGTH_PARAM,
        messages_param="input",
        constraint=constraint,
        arrival_s=services.manager.now_s(),
        names=NAMES,
    )
    async with exchange.abort_on_disconnect():
        with await start_chat(exchange, services, call) as chat:
            writer = _Writer(services, chat, read)
            if request.stream:
                exchange.failure_event = writer.fail
                await send_stream(exchange, chat, writer)
            else:
                deltas: list[Delta] = []
                async for rows in chat:
                    for row in rows:
                        deltas += row.deltas
                        writer.finish_reason = row.finish_reason
                writer.stream.events(merged(deltas))
                writer.closing()
                await exchange.send_json(writer.stream.body)


async def response_input_tokens(exchange: Exchange, services: Services) -> None:
    """The number of tokens of the prompt of a response."""
    read = await services.read(exchange, lambda body: _read(body, services))
    scheduling = exchange.caller.scheduling(read.request)
    async with exchange.abort_on_disconnect():
        plan = await services.plan_chat(read.conversation, scheduling=scheduling, messages_param="input")
        [ids] = await services.encoder.encode([plan.prompt], add_special_tokens=False, param="input")
        warnings = first_warnings(read.warnings + plan.warnings)
        await exchange.send_json(InputTokensBody(input_tokens=len(ids), warnings=warnings or UNSET))


def _read(body: dict[str, Any], services: Services) -> ReadResponses:
    config = services.config
    read = read_responses(
        body, config.limits, config, services.sampling_defaults, strict=config.server.strict
    )
    services.check_model(read.request.model)
    return read


class _Writer:
    """Writes the stream of one response.

    Attributes:
        stream: of the events.
        finish_reason: of the answer; None before its end.
    """

    def __init__(self, services: Services, chat: ChatGeneration, read: ReadResponses) -> None:
        self._chat = chat
        self.finish_reason: str | None = None
        self.stream = ResponseStream(
            _body(services, chat, read), lambda prefix: f"{prefix}_{uuid.uuid4().hex}", read.namespaces
        )

    def begin(self, row: AnswerRow) -> bytes:
        """The first events."""
        return self.stream.begin()

    def row(self, row: AnswerRow) -> bytes:
        """The events for a row."""
        self.finish_reason = row.finish_reason
        return self.stream.events(row.deltas)

    def closing(self) -> bytes:
        """The last events."""
        if self.finish_reason == "abort":
            return self.stream.fail(_ABORTED, _usage(self._chat))
        self.stream.body.truncated = truncated_of(self._chat.generation.choices[0], self._chat.tokenizer)
        return self.stream.complete(self.finish_reason, _usage(self._chat), int(time.time()))

    def fail(self, reply: ErrorReply) -> bytes:
        """The last events of a stream that fails."""
        error = reply.body.error
        code = "rate_limit_exceeded" if reply.status == 429 else "server_error"
        return self.stream.fail(ResponseError(code, error.message), _usage(self._chat))


def _body(services: Services, chat: ChatGeneration, read: ReadResponses) -> ResponseBody:
    """The response at its beginning, with the request's settings."""
    request, sampling = read.request, read.sampling
    reasoning = request.reasoning or {}
    text = request.text or {}
    return ResponseBody(
        id=chat.generation.id.replace("-", "_"),
        created_at=int(time.time()),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        model=chat.generation.scheduling.served_as or services.served_model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning={"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        temperature=sampling.temperature,
        text={"format": text.get("format") or {"type": "text"}},
        tool_choice="auto" if request.tool_choice is None else request.tool_choice,
        tools=request.tools or [],
        top_p=sampling.top_p,
        user=request.user,
        metadata=request.metadata or {},
        warnings=first_warnings(read.warnings + chat.warnings) or UNSET,
    )


def _usage(chat: ChatGeneration) -> ResponsesUsage:
    usage = usage_of(chat.generation, tokenizer=chat.tokenizer)
    return ResponsesUsage(
        usage.prompt_tokens,
        InputDetails(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        OutputDetails(chat.reasoning_tokens() or 0),
        usage.total_tokens,
        usage.grammar,
    )
