"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from ....runtime.sampling_params import SamplingParams
from ...generation import GenerationRequest, Row
from ...scheduling_options import Scheduling
from ..delivery import Collected, collect, finish_reason, stream
from ..exchange import Exchange
from ..guards.auth import Caller, scheduling_of
from ..schema.accounting import Timings, UsageBody
from ..schema.chat_messages import template_messages
from ..schema.errors import OPENAI_NAMES, renamed_fields
from ..schema.field_policy import CHAT_NOT_YET, FieldPolicy, first_warnings
from ..schema.generation_fields import StreamOptions
from ..schema.json_body import Body, convert
from ..schema.logprobs import ChatLogprobs, chat_logprobs, int32s, unpack
from ..schema.protocol import ChatRequest
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
    chat = await services.read(exchange, lambda body: _read(body, services, exchange.caller))
    arrival_s = services.manager.now_s()
    async with exchange.abort_on_disconnect():
        prompt = await services.render_chat(
            chat.request, chat.messages, add_generation_prompt=chat.request.add_generation_prompt is not False
        )
        generation_request = GenerationRequest(
            prompts=[prompt],
            sampling=chat.sampling,
            n=chat.num_choices,
            id_prefix="chatcmpl",
            scheduling=chat.scheduling,
            add_special_tokens=False,
            prompt_param="messages",
            length_param=chat.length_param,
            arrival_s=arrival_s,
        )
        with renamed_fields(OPENAI_NAMES | {"max_new_tokens": chat.length_param}):
            generation = await services.start(exchange, generation_request)
        with generation:
            if chat.options is not None:
                chunks = ChunkWriter(ChatChunk, services, generation, chat.options, chat.warnings)
                await stream(exchange, generation, _ChatStream(services, chunks))
            else:
                choices = _choices(services, await collect(generation))
                await exchange.send_json(
                    whole_body(ChatCompletion, services, generation, choices, chat.warnings)
                )


class _Chat(NamedTuple):
    """A chat request, checked.

    Attributes:
        messages: for the template.
        length_param: the field that bounds the answer.
        options: of a stream; None: an answer in one piece.
    """

    request: ChatRequest
    messages: list[dict[str, str]]
    sampling: SamplingParams
    num_choices: int
    scheduling: Scheduling
    length_param: str
    options: StreamOptions | None
    warnings: list[str]


def _read(body: Body, services: Services, caller: Caller) -> _Chat:
    strict = services.config.server.strict
    warnings = _POLICY.check(body, strict=strict)
    request = convert(body, ChatRequest)
    services.check_model(request.model)
    options = request.events()
    limits = services.config.limits
    messages, more_warnings = template_messages(request.messages, strict=strict, limits=limits)
    warnings = first_warnings(warnings + more_warnings)
    max_new_tokens, length_param = request.max_new_tokens()
    with renamed_fields(OPENAI_NAMES | {"max_new_tokens": length_param}):
        sampling = request.sampling(
            limits,
            max_new_tokens=max_new_tokens,
            min_new_tokens=request.min_tokens,
            keep_stop=request.include_stop_str_in_output,
            logprobs=request.num_top_logprobs(limits),
        )
    return _Chat(
        request,
        messages,
        sampling,
        request.num_choices(limits),
        scheduling_of(request, caller),
        length_param,
        options,
        warnings,
    )


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
