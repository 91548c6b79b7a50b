"""Ollama's chat API: messages and options to a request, and deltas to lines.

Each line is a JSON object. A call is sent when it is complete, with its arguments as an object; one that is cut is not
sent. An answer in one piece has the joined texts and all calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, ClassVar, Final, NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from ....runtime.config.answer_config import RequestLimits
from ....runtime.config.engine_config import EngineConfig
from ....runtime.sampling_defaults import SamplingDefaults
from ....runtime.sampling_params import MAX_TEMPERATURE, SamplingParams
from ...conversation.conversation import Conversation, History, ReasoningOptions, Tool, parts_of
from ...conversation.deltas import CallArguments, CallBegin, CallEnd, Content, Delta, Reasoning
from ...conversation.parsing.json_text import object_of
from ...generation import Constraint, GenerationRequest
from ..framing import line
from ..schema.constraints import json_object, json_schema
from ..schema.errors import renamed_fields
from ..schema.field_policy import CALL_POLICY, Notes, policy_of
from ..schema.generation_fields import SamplingFields
from ..schema.image_parts import RequestImages
from ..schema.parts import ONLY_TEXT, left_out, result_text
from ..schema.values import (
    Body,
    check_limit,
    convert,
    effort_options,
    objects,
    one_of,
    optional_object,
    optional_text,
    refused,
    show,
)
from .wire import (
    CHAT_POLICY,
    GENERATE_POLICY,
    OWN_NAMES,
    CalledFunction,
    OllamaAnswer,
    OllamaCall,
    OllamaChatBody,
    OllamaChatRequest,
    OllamaFields,
    OllamaGenerateBody,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
)

LENGTH_PARAM: Final = "options.num_predict"
FORMAT_PARAM: Final = "format"
_SAMPLING: Final = {
    option: name
    for name in SamplingFields.__struct_fields__
    if (option := OWN_NAMES.get(name, name)) in OllamaOptions.__struct_fields__
}
"""Field of `options` -> field of `SamplingParams`."""
NAMES: Final = {
    "max_new_tokens": LENGTH_PARAM,
    "reasoning_effort": "think",
    "thinking": "think",
    **{name: f"options.{option}" for option, name in _SAMPLING.items()},
}


_MESSAGE: Final = policy_of(
    ("role", "content", "thinking", "images", "tool_name", "name"),
    ("tool_call_id",),
    {"tool_calls": CALL_POLICY},
)


def read_chat(
    body: Body,
    config: EngineConfig,
    defaults: SamplingDefaults,
    *,
    max_model_len: int,
    sees_images: bool = False,
) -> tuple[OllamaChatRequest, GenerationRequest]:
    """Check a request of `/api/chat`; without messages, the client only wants the model to be loaded.

    Raises:
        RequestError: a field is refused; names its path.
    """
    strict = config.server.strict
    notes = Notes(CHAT_POLICY.check(body, strict=strict), strict=strict)
    request = convert(body, OllamaChatRequest)
    history = History()
    messages = request.messages or []
    limit = config.limits.max_messages
    check_limit("messages", len(messages), "messages", limit, "max_messages")
    calls = _Calls()
    images = RequestImages(config.limits) if sees_images else None
    for at, message in objects(messages, "messages"):
        notes.check(_MESSAGE, message, at)
        _read_message(message, at, history, calls, notes, images)
    tools = _tools(request.tools or [])
    generation = _read(request, history, tools, "messages", config, defaults, max_model_len, notes)
    return request, generation


def read_generate(
    body: Body,
    config: EngineConfig,
    defaults: SamplingDefaults,
    *,
    max_model_len: int,
    sees_images: bool = False,
) -> tuple[OllamaGenerateRequest, GenerationRequest]:
    """Check a request of `/api/generate`; a raw prompt is not rendered.

    Raises:
        RequestError: a field is refused; names its path.
    """
    strict = config.server.strict
    notes = Notes(GENERATE_POLICY.check(body, strict=strict), strict=strict)
    request = convert(body, OllamaGenerateRequest)
    history = History()
    if request.images and not sees_images:
        raise refused("images", f"has images, {ONLY_TEXT}", "unsupported_value")
    if request.raw or request.suffix:
        other = "raw" if request.raw else "suffix"
        for name in ("system", "format", "think", "images", "suffix" if request.raw else "raw"):
            if getattr(request, name):
                raise refused(name, f"cannot be combined with {other}; send one of them", "unsupported_value")
    elif request.prompt:
        if request.system:
            history.system(request.system)
        images = RequestImages(config.limits).ollama(request.images or [], "images")
        history.user([*images, {"type": "text", "text": request.prompt}] if images else request.prompt)
    generation = _read(request, history, (), "prompt", config, defaults, max_model_len, notes)
    if request.raw and request.prompt:
        generation = replace(generation, prompts=[request.prompt], conversation=None)
    return request, generation


def _read(
    request: OllamaFields,
    history: History,
    tools: tuple[Tool, ...],
    param: str,
    config: EngineConfig,
    defaults: SamplingDefaults,
    max_model_len: int,
    notes: Notes,
) -> GenerationRequest:
    options = convert(request.options or {}, OllamaOptions, "options")
    if options.num_ctx is not None:
        _check_context(options.num_ctx, max_model_len, notes)
    constraint = _format(request.format, config)
    if constraint is not None:
        notes.warn(*constraint.warnings)
    conversation = Conversation(
        messages=history.messages,
        tools=tools,
        spec=None if constraint is None else constraint.use.spec,
        reasoning=_reasoning(request.think),
    )
    return GenerationRequest(
        conversation=conversation,
        constraint=constraint,
        sampling=_sampling(options, config.limits, defaults),
        id_prefix="ollama",
        prompt_param=param,
        length_param=LENGTH_PARAM,
        cut_length=True,
        names=NAMES,
        warnings=notes.warnings,
    )


# ---------------------------------------------------------------- messages


class _Calls:
    """Ids for calls, which have none in this API: a result belongs to the first call without one."""

    def __init__(self) -> None:
        self._open: list[tuple[str, str]] = []  # id, name
        self._num = 0

    def begin(self, name: str) -> str:
        """The id of a new call."""
        call_id = f"call{self._num:05d}"  # nine letters and digits: some templates demand them
        self._num += 1
        self._open.append((call_id, name))
        return call_id

    def end(self, name: str | None) -> str:
        """The id of the call that a result belongs to."""
        for place, (call_id, called) in enumerate(self._open):
            if name is None or called == name:
                del self._open[place]
                return call_id
        return self.begin(name or "")


def _read_message(
    message: Body, at: str, history: History, calls: _Calls, notes: Notes, images: RequestImages | None
) -> None:
    role = one_of(message.get("role"), ("system", "user", "assistant", "tool"), f"{at}.role")
    parts: list[dict[str, Any]] = []
    if message.get("images") and role == "user" and images is not None:
        parts = images.ollama(message["images"], f"{at}.images")
    elif message.get("images"):
        if role in ("system", "user"):
            raise refused(f"{at}.images", f"has images, {ONLY_TEXT}", "unsupported_value")
        left_out("images", at, notes)
    if role == "tool":
        content = result_text(message.get("content"), f"{at}.content", notes)
    else:
        content = convert(message.get("content") or "", str, f"{at}.content")
    match role:
        case "system":
            history.system(content)
        case "user":
            history.user([*parts, *parts_of(content)] if parts else content)
        case "tool":
            name = optional_text(message.get("tool_name") or message.get("name"), f"{at}.tool_name")
            history.result(calls.end(name), content, name)
        case _:
            thinking = convert(message.get("thinking") or "", str, f"{at}.thinking")
            if thinking:
                history.reasoning(thinking)
            if content or not message.get("tool_calls"):
                history.assistant(content)
            for place, call in objects(message.get("tool_calls") or [], f"{at}.tool_calls"):
                function = convert(call.get("function"), dict[str, Any], f"{place}.function")
                name = convert(function.get("name"), str, f"{place}.function.name")
                arguments = convert(
                    function.get("arguments") or {}, dict[str, Any], f"{place}.function.arguments"
                )
                history.call(calls.begin(name), name, json.dumps(arguments, ensure_ascii=False))


def _tools(tools: list[dict[str, Any]]) -> tuple[Tool, ...]:
    kept: list[Tool] = []
    for at, tool in objects(tools, "tools"):
        one_of(tool.get("type", "function"), ("function",), f"{at}.type")
        function = convert(tool.get("function"), dict[str, Any], f"{at}.function")
        kept.append(
            Tool(
                name=convert(function.get("name"), str, f"{at}.function.name"),
                description=convert(function.get("description") or "", str, f"{at}.function.description"),
                parameters=optional_object(function.get("parameters"), f"{at}.function.parameters"),
            )
        )
    return tuple(kept)


# ---------------------------------------------------------------- settings


def _format(value: object, config: EngineConfig) -> Constraint | None:
    if value in (None, ""):
        return None
    if value == "json":
        return json_object(FORMAT_PARAM, config)
    if not isinstance(value, dict):
        raise refused(FORMAT_PARAM, f'is {show(value)}, but it must be "json" or a JSON Schema')
    return json_schema(value, FORMAT_PARAM, FORMAT_PARAM, config, strict=False)


def _reasoning(think: bool | str | None) -> ReasoningOptions:
    if isinstance(think, str) and think:
        return effort_options(think, "think")
    return ReasoningOptions(enabled=None if think == "" else think)


def _check_context(num_ctx: int, max_model_len: int, notes: Notes) -> None:
    """The context is a setting of this server, for all requests."""
    if num_ctx < 1:
        raise refused("options.num_ctx", f"is {num_ctx}, but it must be at least 1; leave it out")
    if num_ctx != max_model_len:
        notes.warn(
            f"options.num_ctx is {num_ctx}, but the context of this server has {max_model_len} tokens; it has no effect"
        )


class _OllamaSampling(SamplingFields, kw_only=True):
    """The fields with the engine's range of temperatures; this API has none."""

    max_temperature: ClassVar[float] = MAX_TEMPERATURE


def _sampling(options: OllamaOptions, limits: RequestLimits, defaults: SamplingDefaults) -> SamplingParams:
    num_predict = options.num_predict
    if num_predict is not None and num_predict < 1:
        if num_predict not in (-1, -2):
            raise refused(
                LENGTH_PARAM, f"is {num_predict}, but it must be at least 1, or -1 or -2 for no limit"
            )
        num_predict = None
    fields = _OllamaSampling(**{name: getattr(options, option) for option, name in _SAMPLING.items()})
    with renamed_fields(NAMES):
        return fields.sampling(
            limits, defaults, max_new_tokens=num_predict, min_new_tokens=None, keep_stop=False
        )


CONTENT_TYPE: Final = b"application/x-ndjson"


class Durations(NamedTuple):
    """The end of an answer: token counts, and times in nanoseconds."""

    total_ns: int
    prompt_tokens: int
    prompt_ns: int
    output_tokens: int
    output_ns: int


class Part(NamedTuple):
    """Part of an answer."""

    content: str = ""
    thinking: str = ""
    calls: tuple[OllamaCall, ...] = ()


class OllamaStream:
    """Writes one answer."""

    def __init__(self, model: str, *, chat: bool, now: Callable[[], datetime] | None = None) -> None:
        """Begin.

        Args:
            model: the name that the request has.
            chat: write for `/api/chat`; otherwise for `/api/generate`.
            now: a clock.
        """
        self._model = model
        self._chat = chat
        self._now = now or (lambda: datetime.now(UTC))
        self._call: tuple[str, str] | None = None  # id and name of the open one
        self._arguments: list[str] = []

    def events(self, deltas: Iterable[Delta]) -> bytes:
        """The lines for some deltas."""
        return b"".join(line(self._body(part)) for part in self.parts(deltas))

    def complete(self, done_reason: str, durations: Durations | None, warnings: list[str]) -> bytes:
        """The last line."""
        return line(self.whole([], done_reason, durations, warnings))

    def whole(
        self, deltas: Iterable[Delta], done_reason: str, durations: Durations | None, warnings: list[str]
    ) -> OllamaAnswer:
        """The answer in one piece, of all deltas."""
        parts = list(self.parts(deltas))
        body = self._body(
            Part(
                "".join(part.content for part in parts),
                "".join(part.thinking for part in parts),
                tuple(call for part in parts for call in part.calls),
            )
        )
        body.done = True
        body.done_reason = done_reason
        if durations is not None:
            body.total_duration = durations.total_ns
            body.load_duration = 0
            body.prompt_eval_count = durations.prompt_tokens
            body.prompt_eval_duration = durations.prompt_ns
            body.eval_count = durations.output_tokens
            body.eval_duration = durations.output_ns
        body.warnings = warnings or UNSET
        return body

    def parts(self, deltas: Iterable[Delta]) -> Iterable[Part]:
        """The parts of the answer; a call is one part."""
        for delta in deltas:
            match delta:
                case Reasoning(text):
                    yield Part(thinking=text)
                case Content(text):
                    yield Part(content=text)
                case CallBegin(_, call_id, name):
                    self._call = (call_id, name)
                    self._arguments.clear()
                case CallArguments(_, text):
                    self._arguments.append(text)
                case CallEnd() if self._call is not None:
                    call_id, name = self._call
                    self._call = None
                    arguments = object_of("".join(self._arguments))
                    yield Part(calls=(OllamaCall(call_id, CalledFunction(name, arguments)),))

    def _body(self, part: Part) -> OllamaAnswer:
        created_at = self._now().isoformat().replace("+00:00", "Z")
        thinking = part.thinking or UNSET
        if not self._chat:
            return OllamaGenerateBody(
                model=self._model, created_at=created_at, response=part.content, thinking=thinking
            )
        message = OllamaMessage(content=part.content, thinking=thinking, tool_calls=list(part.calls) or UNSET)
        return OllamaChatBody(model=self._model, created_at=created_at, message=message)
