"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from msgspec import UNSET
from msgspec.structs import replace

from ....models.tokenizer.tokenizer import Tokenizer
from ....runtime.errors import RequestError
from ....runtime.feasibility import max_new_tokens_for
from ...conversation.deltas import Delta
from ...generation import Generation, GenerationRequest, Row
from ..delivery import collect_deltas, stream
from ..exchange import Exchange
from ..guards.auth import Caller
from ..schema.accounting import truncated_of, usage_of
from ..services import Engine
from .convert import MessageStream, read_count, read_messages, user_of
from .wire import CountBody, MessageBody, MessagesRequest, MessageUsage, OutputTokensDetails, StopReason

_REQUEST_ID: Final = b"request-id"
"""The header in which Anthropic's clients look for `Exchange.request_id`."""


async def messages(exchange: Exchange, engine: Engine) -> None:
    """Answer a chat in the form of the Messages API."""
    exchange.more_headers.append((_REQUEST_ID, exchange.request_id.encode()))
    body, request = await engine.read(exchange, lambda body: _read(body, engine, exchange.caller))
    async with exchange.abort_on_disconnect():
        with await engine.start(exchange, request) as generation:
            writer = _Writer(engine, generation, body)
            if body.stream:
                await stream(exchange, generation, writer)
            else:
                writer.stream.events(await collect_deltas(generation))
                writer.closing()
                await exchange.send_json(writer.stream.body)


async def count_tokens(exchange: Exchange, engine: Engine) -> None:
    """The number of tokens of the prompt of a message."""
    exchange.more_headers.append((_REQUEST_ID, exchange.request_id.encode()))
    request = await engine.read(exchange, lambda body: _read_count(body, engine))
    async with exchange.abort_on_disconnect():
        num_tokens, warnings = await engine.count_prompt(exchange, request)
        await exchange.send_json(CountBody(input_tokens=num_tokens, warnings=warnings or UNSET))


def _read(body: dict[str, Any], engine: Engine, caller: Caller) -> tuple[MessagesRequest, GenerationRequest]:
    request, generation = read_messages(body, engine.config, engine.sampling_defaults)
    scheduling = engine.with_adapter(caller.scheduling(request, user_of(request)), request.model)
    return request, replace(generation, scheduling=scheduling)


def _read_count(body: dict[str, Any], engine: Engine) -> GenerationRequest:
    request, generation = read_count(body, engine.config)
    engine.check_model(request.model)
    return generation


class _Writer:
    """Writes the stream of one message.

    Attributes:
        stream: of the events.
    """

    def __init__(self, engine: Engine, generation: Generation, request: MessagesRequest) -> None:
        self._tokenizer = engine.tokenizer
        self._generation = generation
        self._stops = request.stop_sequences or []
        room = max_new_tokens_for(len(generation.choices[0].prompt_ids), engine.manager.capacity)
        self._is_cut = room < request.max_tokens
        self._begun = False
        self.stream = MessageStream(
            MessageBody(
                id=generation.id.replace("-", "_"),
                model=request.model or engine.served_model,
                usage=_usage(generation, self._tokenizer),
                warnings=generation.request.warnings or UNSET,
            )
        )

    def events(self, row: Row, deltas: Sequence[Delta]) -> bytes:
        """The events for a row, after the first ones."""
        begin = b"" if self._begun else self.stream.begin(_usage(self._generation, self._tokenizer))
        self._begun = True
        return begin + self.stream.events(deltas)

    def closing(self) -> bytes:
        """The last events.

        Raises:
            RequestError: the request was aborted; the API has no stop reason for that.
        """
        stop_reason, stop_sequence = self._stop()
        return self.stream.complete(stop_reason, stop_sequence, _usage(self._generation, self._tokenizer))

    def _stop(self) -> tuple[StopReason, str | None]:
        [choice] = self._generation.choices
        matched = None if choice.finish is None else choice.finish.matched
        match choice.finish_reason:
            case "abort":
                raise RequestError("the request was aborted", code="aborted", status=500)
            case "length":
                return "model_context_window_exceeded" if self._is_cut else "max_tokens", None
            case "tool_calls":
                return "tool_use", None
            case _ if isinstance(matched, str) and matched in self._stops:
                return "stop_sequence", matched
            case _:
                return "end_turn", None


def _usage(generation: Generation, tokenizer: Tokenizer) -> MessageUsage:
    usage = usage_of(generation, tokenizer=tokenizer)
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(generation.reasoning_tokens() or 0),
        grammar=usage.grammar,
        truncated=truncated_of(generation.choices[0], tokenizer),
    )
