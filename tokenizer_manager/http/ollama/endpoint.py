"""`POST /api/chat` and `POST /api/generate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ....runtime.config.engine_config import EngineConfig
from ....runtime.config.request_limits import RequestLimits
from ...conversation.deltas import Content, Delta, merged
from ...generation import Generation, GenerationRequest
from ...scheduling_options import Scheduling
from ..chat_run import AnswerRow, ChatCall, ChatGeneration, send_stream, start_chat
from ..delivery import finish_reason
from ..exchange import Exchange
from ..guards.auth import Caller
from ..schema.accounting import timings_of, usage_of
from ..schema.errors import renamed_fields
from ..schema.field_policy import first_warnings
from ..services import Services
from .convert import (
    CONTENT_TYPE,
    LENGTH_PARAM,
    NAMES,
    Durations,
    OllamaStream,
    ReadOllama,
    read_chat,
    read_generate,
)

_DONE_REASONS: Final = {"tool_calls": "stop"}
_NS_PER_MS: Final = 1_000_000


async def ollama_chat(exchange: Exchange, services: Services) -> None:
    """Answer a chat in the form of Ollama's API."""
    read = await services.read(exchange, lambda body: _read(read_chat, body, services))
    await _answer(exchange, services, read, "messages", chat=True)


async def ollama_generate(exchange: Exchange, services: Services) -> None:
    """Answer a prompt in the form of Ollama's API."""
    read = await services.read(exchange, lambda body: _read(read_generate, body, services))
    await _answer(exchange, services, read, "prompt", chat=False)


def _read(reader: Callable[..., ReadOllama], body: dict[str, Any], services: Services) -> ReadOllama:
    limits: RequestLimits = services.config.limits
    answers: EngineConfig = services.config
    read = reader(
        body,
        limits,
        answers,
        services.sampling_defaults,
        max_model_len=services.manager.capacity.max_model_len,
        strict=services.config.server.strict,
    )
    services.check_model(read.model)
    return read


async def _answer(
    exchange: Exchange, services: Services, read: ReadOllama, param: str, *, chat: bool
) -> None:
    stream = OllamaStream(read.model or services.served_model, chat=chat)
    if read.raw is None and not read.conversation.messages:  # loads the model, which is loaded
        await exchange.send_json(stream.whole([], "load", None, read.warnings))
        return
    async with exchange.abort_on_disconnect():
        if read.raw is not None:
            await _answer_raw(exchange, services, read, stream)
            return
        constraint = read.constraint
        call = ChatCall(
            conversation=read.conversation,
            sampling=read.sampling,
            id_prefix="ollama",
            scheduling=services.with_adapter(_scheduling(exchange.caller), read.model),
            length_param=LENGTH_PARAM,
            messages_param=param,
            constraint=constraint,
            arrival_s=services.manager.now_s(),
            names=NAMES,
        )
        with await start_chat(exchange, services, call) as generation:
            writer = _Writer(generation, stream, read.warnings)
            if read.stream:
                await send_stream(exchange, generation, writer, CONTENT_TYPE)
                return
            deltas: list[Delta] = []
            async for rows in generation:
                for row in rows:
                    deltas += row.deltas
                    writer.done_reason = row.finish_reason
            await exchange.send_json(
                stream.whole(
                    merged(deltas), *ending(generation.generation, writer.done_reason), writer.warnings
                )
            )


async def _answer_raw(exchange: Exchange, services: Services, read: ReadOllama, stream: OllamaStream) -> None:
    """Answer a prompt without the chat template."""
    assert read.raw is not None
    request = GenerationRequest(
        prompts=[read.raw],
        sampling=read.sampling,
        id_prefix="ollama",
        scheduling=services.with_adapter(_scheduling(exchange.caller), read.model),
        length_param=LENGTH_PARAM,
    )
    with renamed_fields(NAMES):
        generation = await services.start(exchange, request)
    deltas: list[Delta] = []
    reason: str | None = None
    with generation:
        warnings = read.warnings + services.second_bos(generation, request, "leave it out of the prompt")
        async for rows in generation:
            lines = b""
            for row in rows:
                row.choice.read(row.output)
                delta = Content(row.output.text)
                reason = finish_reason(row.output.finish)
                if not read.stream:
                    deltas.append(delta)
                elif delta.text:
                    lines += stream.events([delta])
            if read.stream:
                if not exchange.streaming:
                    await exchange.start_events(CONTENT_TYPE)
                await exchange.send_events(lines)
        if read.stream:
            await exchange.end_events(stream.complete(*ending(generation, reason), warnings))
        else:
            await exchange.send_json(stream.whole(merged(deltas), *ending(generation, reason), warnings))


class _Writer:
    """Writes the stream of one answer.

    Attributes:
        done_reason: of the answer; None before its end.
        warnings: for its last line.
    """

    def __init__(self, chat: ChatGeneration, stream: OllamaStream, warnings: list[str]) -> None:
        self._chat = chat
        self._stream = stream
        self.done_reason: str | None = None
        self.warnings = first_warnings(warnings + chat.warnings)

    def begin(self, row: AnswerRow) -> bytes:
        """Nothing: the first line has text."""
        return b""

    def row(self, row: AnswerRow) -> bytes:
        """The lines for a row."""
        self.done_reason = row.finish_reason
        return self._stream.events(row.deltas)

    def closing(self) -> bytes:
        """The last line."""
        return self._stream.complete(*ending(self._chat.generation, self.done_reason), self.warnings)


def ending(generation: Generation, reason: str | None) -> tuple[str, Durations]:
    """`done_reason` and the numbers of a finished answer."""
    usage, times = usage_of(generation), timings_of(generation)
    prompt_ms = times.prompt_ms
    durations = Durations(
        total_ns=round((times.queue_ms + prompt_ms + times.predicted_ms) * _NS_PER_MS),
        prompt_tokens=usage.prompt_tokens,
        prompt_ns=round(prompt_ms * _NS_PER_MS),
        output_tokens=usage.completion_tokens,
        output_ns=round(times.predicted_ms * _NS_PER_MS),
    )
    return _DONE_REASONS.get(reason or "stop", reason or "stop"), durations


def _scheduling(caller: Caller) -> Scheduling:
    return Scheduling(tenant=caller.tenant(None), extra_key=caller.namespace(None), owner=caller.owner)
