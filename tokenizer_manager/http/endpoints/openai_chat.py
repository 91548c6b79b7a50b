"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Final

import msgspec

from ...generation import GenerationRequest, Row
from ..delivery import Collected, collect, finish_reason, stream
from ..exchange import Exchange
from ..guards.auth import scheduling_of
from ..schema.accounting import Timings, UsageBody
from ..schema.chat_messages import template_messages
from ..schema.errors import renamed_fields
from ..schema.field_policy import CHAT_NOT_YET, FieldPolicy, first_warnings
from ..schema.generation_fields import StreamOptions
from ..schema.json_body import convert
from ..schema.logprobs import ChatLogprobs, chat_logprobs, int32s, unpack
from ..schema.protocol import ChatRequest, checked_template_variables
from ..services import Services
from .openai_body import ChunkWriter, OpenAIBody, whole_body

_POLICY: Final = FieldPolicy(
    ChatRequest, CHAT_NOT_YET, nested={"stream_options": FieldPolicy(StreamOptions, {}, no_effect=())}
)


class ChatMessageBody(msgspec.Struct, kw_only=True):
    """The assistant's message; clients expect the field `refusal`."""

    role: str = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: ChatMessageBody
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatCompletion(OpenAIBody[ChatChoice], kw_only=True):
    """The body in one piece."""

    object: str = "chat.completion"
    usage: UsageBody
    timings: Timings


class ChatChunkChoice(msgspec.Struct):
    """The new part of one answer."""

    index: int
    delta: dict[str, str | None]
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(OpenAIBody[ChatChunkChoice], kw_only=True):
    """One event of a stream."""

    object: str = "chat.completion.chunk"


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
                chunks = ChunkWriter(ChatChunk, services, generation, options, warnings)
                await stream(exchange, generation, _ChatStream(services, chunks))
            else:
                choices = _choices(services, await collect(generation))
                await exchange.send_json(whole_body(ChatCompletion, services, generation, choices, warnings))


def _choices(services: Services, answers: list[Collected]) -> list[ChatChoice]:
    return [
        ChatChoice(
            index=index,
            message=ChatMessageBody(content=answer.text),
            logprobs=chat_logprobs(answer.logprobs, services.tokenizer) if answer.logprobs else None,
            finish_reason=finish_reason(answer.finish),
        )
        for index, answer in enumerate(answers)
    ]


class _ChatStream:
    """Writes a role chunk, content chunks and a finish chunk for each choice."""

    def __init__(self, services: Services, chunks: ChunkWriter[ChatChunkChoice]) -> None:
        self._services = services
        self._chunks = chunks
        self._begun: set[int] = set()

    def events(self, row: Row) -> bytes:
        """The events for one row."""
        index, output = row.choice.index, row.output
        events = b""
        if index not in self._begun:
            self._begun.add(index)
            role = {"role": "assistant", "content": "", "refusal": None}
            events += self._chunks.event(ChatChunkChoice(index, role))
        entries = unpack(output.logprobs, int32s(output.token_ids)) if output.logprobs is not None else []
        if output.text or entries:
            logprobs = chat_logprobs(entries, self._services.tokenizer) if entries else None
            events += self._chunks.event(ChatChunkChoice(index, {"content": output.text}, logprobs))
        if output.finish is not None:
            events += self._chunks.finish_event(
                ChatChunkChoice(index, {}, None, finish_reason(output.finish))
            )
        return events

    def closing(self) -> bytes:
        """The usage chunk, if it was asked for."""
        return self._chunks.closing()
