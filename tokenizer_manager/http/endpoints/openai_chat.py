"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from ...generation import Generation, GenerationRequest, Row
from ..delivery import Collected, collect, event, finish_reason, stream
from ..exchange import Exchange
from ..guards.auth import scheduling_of
from ..schema.accounting import Timings, UsageBody, timings_of, usage_of
from ..schema.chat_messages import template_messages
from ..schema.errors import renamed_fields
from ..schema.field_policy import CHAT_NOT_YET, FieldPolicy, first_warnings
from ..schema.generation_fields import StreamOptions
from ..schema.json_body import convert
from ..schema.logprobs import ChatLogprobs, chat_logprobs, int32s, unpack
from ..schema.protocol import ChatRequest, checked_template_variables
from ..services import Services

_POLICY: Final = FieldPolicy(
    ChatRequest, CHAT_NOT_YET, nested={"stream_options": FieldPolicy(StreamOptions, {}, no_effect=())}
)


class ChatMessageBody(msgspec.Struct, kw_only=True):
    """The assistant's message; clients expect `refusal` to be there."""

    role: str = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: ChatMessageBody
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The body in one piece."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageBody
    timings: Timings
    warnings: list[str] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """What is new of one answer."""

    index: int
    delta: dict[str, str | None]
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


async def chat_completions(exchange: Exchange, services: Services) -> None:
    """Answer a chat."""
    body = await services.read_object(exchange)
    strict = services.config.server.strict
    warnings = _POLICY.check(body, strict=strict)
    request = convert(body, ChatRequest)
    services.check_model(request.model)
    options = request.events()
    limits = services.config.limits
    messages, more_warnings = template_messages(request.messages, strict=strict, limits=limits)
    warnings = first_warnings(warnings + more_warnings)
    max_new_tokens, length_param = request.max_new_tokens()
    sampling = request.sampling(
        limits,
        max_new_tokens=max_new_tokens,
        min_new_tokens=request.min_tokens,
        keep_stop=request.include_stop_str_in_output,
        logprobs=request.num_top_logprobs(limits),
    )
    prompt = services.require_chat_template().render(
        messages,
        add_generation_prompt=request.add_generation_prompt is not False,
        variables=checked_template_variables(request.chat_template_kwargs),
    )
    generation_request = GenerationRequest(
        prompts=[prompt],
        sampling=sampling,
        n=request.num_choices(limits),
        id_prefix="chatcmpl",
        scheduling=scheduling_of(request, exchange.caller),
        add_special_tokens=False,
        prompt_param="messages",
        length_param=length_param,
    )
    async with exchange.abort_on_disconnect():
        with renamed_fields({"max_tokens": length_param}):
            generation = await services.start(exchange, generation_request)
        with generation:
            if options is not None:
                await stream(exchange, generation, _ChatStream(services, generation, options, warnings))
            else:
                answers = await collect(generation)
                await exchange.send_json(_completion(services, generation, answers, warnings))


def _completion(
    services: Services, generation: Generation, answers: list[Collected], warnings: list[str]
) -> ChatCompletion:
    choices = [
        ChatChoice(
            index=index,
            message=ChatMessageBody(content=answer.text),
            logprobs=chat_logprobs(answer.logprobs, services.tokenizer) if answer.logprobs else None,
            finish_reason=finish_reason(answer.finish),
        )
        for index, answer in enumerate(answers)
    ]
    return ChatCompletion(
        id=generation.id,
        created=int(time.time()),
        model=services.served_model,
        system_fingerprint=services.fingerprint,
        choices=choices,
        usage=usage_of(generation),
        timings=timings_of(generation),
        warnings=warnings or UNSET,
    )


class _ChatStream:
    """Writes role, content and finish chunks; the last event carries the timings, a usage chunk comes if asked."""

    def __init__(
        self, services: Services, generation: Generation, options: StreamOptions, warnings: list[str]
    ) -> None:
        self._services = services
        self._generation = generation
        self._options = options
        self._warnings = warnings
        self._created = int(time.time())
        self._begun: set[int] = set()
        self._num_finished = 0

    def events(self, row: Row) -> bytes:
        """The events for one row."""
        index, output = row.choice.index, row.output
        events: list[bytes] = []
        if index not in self._begun:
            self._begun.add(index)
            chunk = self._chunk(
                [ChatChunkChoice(index, {"role": "assistant", "content": "", "refusal": None})]
            )
            if len(self._begun) == 1 and self._warnings:
                chunk.warnings = self._warnings
            events.append(event(chunk))
        entries = unpack(output.logprobs, int32s(output.token_ids)) if output.logprobs is not None else []
        if output.text or entries:
            logprobs = chat_logprobs(entries, self._services.tokenizer) if entries else None
            events.append(event(self._chunk([ChatChunkChoice(index, {"content": output.text}, logprobs)])))
        if output.finish is not None:
            self._num_finished += 1
            chunk = self._chunk([ChatChunkChoice(index, {}, None, finish_reason(output.finish))])
            if self._num_finished == len(self._generation.choices) and not self._options.include_usage:
                chunk.timings = timings_of(self._generation)
            events.append(event(chunk))
        return b"".join(events)

    def closing(self) -> bytes:
        """The usage chunk, if asked for."""
        if not self._options.include_usage:
            return b""
        chunk = self._chunk([])
        chunk.usage = usage_of(self._generation)
        chunk.timings = timings_of(self._generation)
        return event(chunk)

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        chunk = ChatChunk(
            id=self._generation.id,
            created=self._created,
            model=self._services.served_model,
            system_fingerprint=self._services.fingerprint,
            choices=choices,
        )
        if self._options.continuous_usage_stats:
            chunk.usage = usage_of(self._generation)
        elif self._options.include_usage:
            chunk.usage = None
        return chunk
