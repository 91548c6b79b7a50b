"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from msgspec import UNSET

from ....models.tokenizer.tokenizer import Tokenizer
from ...conversation.deltas import CallArguments, CallBegin, CallEnd, Content, Delta, Reasoning
from ...generation import Choice, GenerationRequest, Row, warm_up_of
from ..delivery import Collected, CollectedCall, collect, stop_reason, stream
from ..exchange import Exchange
from ..guards.auth import Caller
from ..schema.accounting import truncated_of
from ..schema.constraints import constraint_of
from ..schema.errors import OPENAI_NAMES, renamed_fields
from ..schema.field_policy import (
    CACHE_OPTIONS_POLICY,
    CHAT_NO_EFFECT,
    CHAT_NOT_YET,
    CHOICE_POLICY,
    FUNCTION_POLICY,
    TOOL_POLICY,
    FieldPolicy,
    policy_of,
)
from ..schema.generation_fields import BACKGROUND_POLICY, StreamOptions
from ..schema.values import Body, convert
from ..services import Engine
from ..token_logprobs import AnswerPlacement, PlacedLogprob, int32s, token_as_id, unpack
from .chunks import ChunkWriter, prompt_logprobs_of, whole_body
from .messages import chat_conversation, reasoning_options, template_messages
from .wire import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessageBody,
    ChatRequest,
    ChatTokenLogprob,
    ChatTopLogprob,
    CustomBody,
    FunctionBody,
    ToolCallBody,
)

_POLICY: Final = FieldPolicy(
    ChatRequest,
    CHAT_NOT_YET,
    no_effect=CHAT_NO_EFFECT,
    nested={
        "stream_options": FieldPolicy(StreamOptions, {}, no_effect=()),
        "tools": TOOL_POLICY,
        "functions": FUNCTION_POLICY,
        "tool_choice": CHOICE_POLICY,
        "function_call": policy_of(("name",)),
        "thinking": policy_of(("budget_tokens",)),
        "reasoning": policy_of(("effort", "max_tokens")),
        "prompt_cache_options": CACHE_OPTIONS_POLICY,
        "background_options": BACKGROUND_POLICY,
    },
)


async def chat_completions(exchange: Exchange, engine: Engine) -> None:
    """Answer a chat."""
    body, request = await engine.read(exchange, lambda body: read_chat(body, engine, exchange.caller))
    async with exchange.abort_on_disconnect():
        with await engine.start(exchange, request) as generation:
            warnings = generation.request.warnings
            old_form = bool(body.functions)
            field = engine.config.answers.reasoning_field
            placements = [_placement(engine.tokenizer, generation.request) for _ in generation.choices]
            options = body.events()
            if options is not None:
                chunks = ChunkWriter(ChatChunk, engine, generation, options, warnings)
                writer = _ChatStream(engine.tokenizer, chunks, placements, field, body, old_form=old_form)
                await stream(exchange, generation, writer)
                return
            answers = await collect(generation)
            choices = [
                _choice(
                    engine.tokenizer, choice, answer, placements[choice.index], field, body, old_form=old_form
                )
                for choice, answer in zip(generation.choices, answers, strict=True)
            ]
            answered = whole_body(ChatCompletion, engine, generation, choices, warnings)
            if body.return_token_ids:
                answered.prompt_token_ids = generation.choices[0].prompt_ids.tolist()
            if body.prompt_logprobs is not None:
                entries = answers[0].prompt_logprobs
                answered.prompt_logprobs = prompt_logprobs_of(entries, body.prompt_logprobs, engine.tokenizer)
            await exchange.send_json(answered)


def read_chat(body: Body, engine: Engine, caller: Caller) -> tuple[ChatRequest, GenerationRequest]:
    """Check the body of a chat.

    Raises:
        RequestError: it is refused.
    """
    strict = engine.config.server.strict
    warnings = _POLICY.check(body, strict=strict)
    request = convert(body, ChatRequest)
    engine.check_model(request.model)
    request.events()
    limits = engine.config.limits
    messages, more_warnings = template_messages(
        request.messages, strict=strict, limits=limits, sees_images=engine.images.are_seen
    )
    warnings += more_warnings
    constraint = constraint_of(request, engine.config.answers, limits, strict_server=strict)
    if constraint is not None:
        warnings += constraint.warnings
    spec = None if constraint is None else constraint.use.spec
    conversation = chat_conversation(request, messages, spec, warnings)
    max_new_tokens, length_param = request.max_new_tokens()
    names = OPENAI_NAMES | {"max_new_tokens": length_param} | reasoning_options(request)[1]
    with renamed_fields(names):
        sampling = request.sampling(
            limits,
            engine.sampling_defaults,
            max_new_tokens=max_new_tokens,
            min_new_tokens=request.min_tokens,
            keep_stop=request.include_stop_str_in_output,
            logprobs=request.num_top_logprobs(limits),
            prompt_logprobs=request.prompt_logprobs,
            logprob_token_ids=request.logprob_token_ids,
        )
    request.messages = []  # the conversation has them; an answer may take long, and images are megabytes
    generation = GenerationRequest(
        conversation=conversation,
        constraint=constraint,
        sampling=sampling,
        n=request.num_choices(limits),
        id_prefix="chatcmpl",
        scheduling=engine.with_adapter(
            caller.scheduling(request, body=body),
            request.model,
            request.lora_path,
        ),
        prompt_param="messages",
        length_param=length_param,
        names=names,
        warnings=warnings,
        reports_progress=request.reports_progress,
    )
    options = request.prompt_cache_options
    is_warm_up = request.n_predict == 0 or (options is not None and options.prewarm)
    return request, warm_up_of(generation) if is_warm_up else generation


def _placement(tokenizer: Tokenizer, request: GenerationRequest) -> AnswerPlacement:
    return AnswerPlacement(
        tokenizer,
        skip_special_tokens=request.sampling.skip_special_tokens,
        keep_special_ids=request.keep_special_ids,
        has_stop_strings=bool(request.sampling.stop),
    )


def _choice(
    tokenizer: Tokenizer,
    choice: Choice,
    answer: Collected,
    placement: AnswerPlacement,
    field: str,
    request: ChatRequest,
    *,
    old_form: bool,
) -> ChatChoice:
    calls = [_call_body(call) for call in answer.calls]
    message = ChatMessageBody(content=answer.content if answer.content or not calls else None)
    if answer.reasoning:
        setattr(message, field, answer.reasoning)
    if calls and old_form and answer.calls:
        message.function_call = FunctionBody(answer.calls[0].name, answer.calls[0].arguments)
    elif calls:
        message.tool_calls = calls
    placed = placement.add(answer.logprobs, answer.text, answer.finish)
    as_ids = bool(request.return_tokens_as_token_ids)
    return ChatChoice(
        index=choice.index,
        message=message,
        logprobs=chat_logprobs(placed, tokenizer, as_ids=as_ids) if answer.logprobs else None,
        finish_reason=_finish_reason(choice.finish_reason, old_form=old_form),
        truncated=truncated_of(choice, tokenizer),
        token_ids=answer.token_ids.tolist() if request.return_token_ids else UNSET,
        stop_reason=stop_reason(answer.finish),
    )


def _call_body(call: CollectedCall) -> ToolCallBody:
    if call.custom:
        return ToolCallBody(id=call.id, type="custom", custom=CustomBody(call.name, call.arguments))
    return ToolCallBody(id=call.id, type="function", function=FunctionBody(call.name, call.arguments))


def _finish_reason(reason: str | None, *, old_form: bool) -> str | None:
    return "function_call" if old_form and reason == "tool_calls" else reason


class _ChatStream:
    """Writes a role chunk, chunks of reasoning, content and calls, and a finish chunk for each choice."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chunks: ChunkWriter[ChatChunkChoice],
        placements: list[AnswerPlacement],
        field: str,
        request: ChatRequest,
        *,
        old_form: bool,
    ) -> None:
        self._has_ids = bool(request.return_token_ids)
        self._as_ids = bool(request.return_tokens_as_token_ids)
        self._tokenizer = tokenizer
        self._placements = placements
        self._chunks = chunks
        self._field = field
        self._old_form = old_form
        self._begun: set[int] = set()
        self._custom: set[tuple[int, int]] = set()  # choice and call

    def events(self, row: Row, deltas: Sequence[Delta]) -> bytes:
        """The events for one row."""
        index, output = row.choice.index, row.output
        events = b""
        if index not in self._begun:
            prompt_ids = UNSET if self._begun or not self._has_ids else row.choice.prompt_ids.tolist()
            self._begun.add(index)
            role = {"role": "assistant", "content": "", "refusal": None}
            events += self._chunks.begin_event(ChatChunkChoice(index, role), index, prompt_ids)
        events += self._chunks.progress_event(row, ChatChunkChoice(index, {}))
        entries = unpack(output.logprobs, int32s(output.token_ids)) if output.logprobs is not None else []
        placed = self._placements[index].add(entries, output.text, output.finish)
        logprobs = chat_logprobs(placed, self._tokenizer, as_ids=self._as_ids) if placed else None
        token_ids = int32s(output.token_ids).tolist() if self._has_ids else []
        bodies = [body for delta in deltas if (body := self._delta(index, delta)) is not None]
        if (logprobs is not None or token_ids) and not bodies:
            bodies = [{"content": ""}]
        for body in bodies:
            events += self._chunks.event(
                ChatChunkChoice(index, body, logprobs, token_ids=token_ids if self._has_ids else UNSET)
            )
            logprobs, token_ids = None, []
        if output.finish is not None:
            reason = _finish_reason(row.choice.finish_reason, old_form=self._old_form)
            truncated = truncated_of(row.choice, self._tokenizer)
            last = ChatChunkChoice(index, {}, None, reason, truncated, stop_reason=stop_reason(output.finish))
            events += self._chunks.finish_event(last)
        return events

    def _delta(self, choice: int, delta: Delta) -> dict[str, Any] | None:
        """The `delta` of a chunk; None if there is nothing to send."""
        match delta:
            case Reasoning(text):
                return {self._field: text}
            case Content(text):
                return {"content": text}
            case CallBegin(call, id_, name, custom):
                if self._old_form:
                    return {"function_call": {"name": name, "arguments": ""}} if call == 0 else None
                kind = "custom" if custom else "function"
                if custom:
                    self._custom.add((choice, call))
                inner = {"name": name, "input" if custom else "arguments": ""}
                return {"tool_calls": [{"index": call, "id": id_, "type": kind, kind: inner}]}
            case CallArguments(call, text):
                if self._old_form:
                    return {"function_call": {"arguments": text}} if call == 0 else None
                if (choice, call) in self._custom:
                    return {"tool_calls": [{"index": call, "custom": {"input": text}}]}
                return {"tool_calls": [{"index": call, "function": {"arguments": text}}]}
            case CallEnd():
                return None

    def closing(self) -> bytes:
        """The end of the stream, with the usage chunk if it was asked for."""
        return self._chunks.closing()


def chat_logprobs(
    placed: Sequence[PlacedLogprob], tokenizer: Tokenizer, *, as_ids: bool = False
) -> ChatLogprobs:
    """The tokens of a text in the chat API's shape; `as_ids`: each one as `token_id:ID` instead of its text."""

    def fields(token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        data = tokenizer.token_bytes(token_id)
        token = token_as_id(token_id) if as_ids else data.decode("utf-8", "replace")
        return token, logprob, list(data)

    content: list[ChatTokenLogprob] = []
    for entry, _ in placed:
        listed = dict([*entry.top, *entry.chosen])
        top = [ChatTopLogprob(*fields(token_id, value)) for token_id, value in listed.items()]
        content.append(ChatTokenLogprob(*fields(entry.token_id, entry.logprob), top))
    return ChatLogprobs(content)
