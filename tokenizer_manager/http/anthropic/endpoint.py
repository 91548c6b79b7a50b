"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Any, Final

from msgspec import UNSET

from ....runtime.errors import RequestError
from ...conversation.deltas import Delta, merged
from ..chat_run import AnswerRow, ChatCall, ChatGeneration, send_stream, start_chat
from ..exchange import Exchange
from ..schema.accounting import truncated_of, usage_of
from ..schema.field_policy import first_warnings
from ..services import Services
from .convert import LENGTH_PARAM, NAMES, MessageStream, ReadCount, ReadMessages, read_count, read_messages
from .wire import CountBody, CountTokensRequest, MessageBody, MessageUsage, OutputTokensDetails, StopReason

_REQUEST_ID: Final = b"request-id"
"""The header in which Anthropic's clients look for `Exchange.request_id`."""


async def messages(exchange: Exchange, services: Services) -> None:
    """Answer a chat in the form of the Messages API."""
    exchange.more_headers.append((_REQUEST_ID, exchange.request_id.encode()))
    read = await services.read(exchange, lambda body: _read(body, services))
    constraint = read.constraint
    call = ChatCall(
        conversation=read.conversation,
        sampling=read.sampling,
        id_prefix="msg",
        scheduling=services.with_adapter(
            exchange.caller.scheduling(read.request, read.user), read.request.model
        ),
        length_param=LENGTH_PARAM,
        constraint=constraint,
        arrival_s=services.manager.now_s(),
        names=NAMES,
    )
    async with exchange.abort_on_disconnect():
        with await start_chat(exchange, services, call) as chat:
            writer = _Writer(services, chat, read)
            if read.request.stream:
                await send_stream(exchange, chat, writer)
            else:
                deltas: list[Delta] = []
                async for rows in chat:
                    for row in rows:
                        deltas += row.deltas
                        writer.last = row
                writer.stream.events(merged(deltas))
                writer.closing()
                await exchange.send_json(writer.stream.body)


async def count_tokens(exchange: Exchange, services: Services) -> None:
    """The number of tokens of the prompt of a message."""
    exchange.more_headers.append((_REQUEST_ID, exchange.request_id.encode()))
    read = await services.read(exchange, lambda body: _read_count(body, services))
    async with exchange.abort_on_disconnect():
        plan = await services.plan_chat(read.conversation)
        [ids] = await services.encoder.encode([plan.prompt], add_special_tokens=False, param="messages")
        warnings = first_warnings(read.warnings + plan.warnings)
        await exchange.send_json(CountBody(input_tokens=len(ids), warnings=warnings or UNSET))


def _read(body: dict[str, Any], services: Services) -> ReadMessages:
    config = services.config
    read = read_messages(body, config.limits, config, services.sampling_defaults, strict=config.server.strict)
    _check_model(read.request, services)
    return read


def _read_count(body: dict[str, Any], services: Services) -> ReadCount:
    config = services.config
    read = read_count(body, config.limits, config, strict=config.server.strict)
    _check_model(read.request, services)
    return read


def _check_model(request: CountTokensRequest, services: Services) -> None:
    services.check_model(request.model)


class _Writer:
    """Writes the stream of one message.

    Attributes:
        stream: of the events.
        last: the latest row.
    """

    def __init__(self, services: Services, chat: ChatGeneration, read: ReadMessages) -> None:
        self._chat = chat
        self._stops = read.request.stop_sequences or []
        self.last: AnswerRow | None = None
        self.stream = MessageStream(
            MessageBody(
                id=chat.generation.id.replace("-", "_"),
                model=read.request.model or services.served_model,
                usage=_usage(chat),
                warnings=first_warnings(read.warnings + chat.warnings) or UNSET,
            )
        )

    def begin(self, row: AnswerRow) -> bytes:
        """The first events."""
        return self.stream.begin(_usage(self._chat))

    def row(self, row: AnswerRow) -> bytes:
        """The events for a row."""
        self.last = row
        return self.stream.events(row.deltas)

    def closing(self) -> bytes:
        """The last events.

        Raises:
            RequestError: the request was aborted; the API has no stop reason for that.
        """
        stop_reason, stop_sequence = self._stop()
        return self.stream.complete(stop_reason, stop_sequence, _usage(self._chat))

    def _stop(self) -> tuple[StopReason, str | None]:
        assert self.last is not None
        finish = self.last.output.finish
        matched = None if finish is None else finish.matched
        match self.last.finish_reason:
            case "abort":
                raise RequestError("the request was aborted", code="aborted", status=500)
            case "length":
                return "max_tokens", None
            case "tool_calls":
                return "tool_use", None
            case _ if isinstance(matched, str) and matched in self._stops:
                return "stop_sequence", matched
            case _:
                return "end_turn", None


def _usage(chat: ChatGeneration) -> MessageUsage:
    usage = usage_of(chat.generation, tokenizer=chat.tokenizer)
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(chat.reasoning_tokens() or 0),
        grammar=usage.grammar,
        truncated=truncated_of(chat.generation.choices[0], chat.tokenizer),
    )
