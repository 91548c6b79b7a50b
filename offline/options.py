"""`CallOptions`: keyword arguments of one call: how its requests are scheduled, and what their answers must match."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypedDict

from msgspec.structs import replace

from ..runtime.config.answer_config import RequestLimits
from ..runtime.config.engine_config import EngineConfig
from ..runtime.errors import RequestError
from ..runtime.grammar_use import GrammarSpec
from ..runtime.request_checks import check_text, plain, wrong_type
from ..runtime.sampling_params import SamplingParams
from ..tokenizer_manager.conversation.conversation import Conversation
from ..tokenizer_manager.generation import Constraint
from ..tokenizer_manager.http.openai.messages import chat_conversation, template_messages
from ..tokenizer_manager.http.openai.wire import ChatRequest
from ..tokenizer_manager.http.schema.constraint_fields import ConstraintFields
from ..tokenizer_manager.http.schema.constraints import constraint_of
from ..tokenizer_manager.http.schema.errors import renamed_fields, renamed_text
from ..tokenizer_manager.http.schema.values import convert
from ..tokenizer_manager.scheduling_options import Scheduling, checked_priority, checked_salt, checked_timeout
from .images import with_image_urls

logger = logging.getLogger(__name__)


class SchedulingOptions(TypedDict, total=False):
    """Scheduling of requests: the HTTP fields of the same names; `tenant` is `user` there.

    Attributes:
        priority: larger goes first, under policies that use it; "high", "normal" and "low" are 20, 0 and -20.
        tenant: the requests are accounted to it, for policies that share capacity between tenants.
        cache_salt: requests share cached prefixes only with requests of the same salt.
        queue_timeout: seconds within which a request must be started; after that it ends with an error.
        timeout: seconds within which a request must be finished.
        lora: name of the LoRA adapter that computes the requests; None: the model itself.
    """

    priority: int | str
    tenant: str
    cache_salt: str
    queue_timeout: float | None
    timeout: float | None
    lora: str | None


class CallOptions(SchedulingOptions, total=False):
    """The options of a generation: how it is scheduled, and what its answers match.

    Attributes:
        response_format: as in the chat API: {"type": "json_schema", "json_schema": {"schema": ...}} and others, or a
            class of pydantic's.
        json_schema: the answers are JSON that matches this JSON Schema: an object, its text, or a class of pydantic's.
        regex: the answers match this regular expression as a whole.
        choice: the answers are one of these texts.
        grammar: the answers match this GBNF or Lark grammar.
    """

    response_format: dict[str, Any] | type[Any] | None
    json_schema: dict[str, Any] | str | type[Any] | None
    regex: str | None
    choice: list[str] | None
    grammar: str | None


class ChatOptions(CallOptions, total=False):
    """The further options of a chat: the fields of the chat API with the same names."""

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    reasoning_effort: str | None
    thinking_token_budget: int | None
    include_reasoning: bool | None
    separate_reasoning: bool | None
    chat_template_kwargs: dict[str, Any] | None
    documents: list[dict[str, Any]] | None
    continue_final_message: bool | None


def conversation_of(
    messages: object,
    options: ChatOptions,
    limits: RequestLimits,
    spec: GrammarSpec | None,
    *,
    sees_images: bool = False,
) -> Conversation:
    """A chat with its tools and options, checked as the chat API does.

    Raises:
        RequestError: a message, a tool or an option is invalid.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        hint = '; pass [{"role": "user", "content": ...}]' if isinstance(messages, str | Mapping) else ""
        wanted = f"a list of messages, each with a role and a content{hint}"
        raise wrong_type("messages", messages, wanted, has_default=False)
    for number, message in enumerate(messages):
        if isinstance(message, Sequence) and not isinstance(message, str | bytes):
            raise RequestError(
                f"messages[{number}] is a list beside messages; pass one conversation, or a list of conversations",
                param="messages",
                code="invalid_type",
            )
        if not isinstance(message, Mapping):
            raise wrong_type(
                f"messages[{number}]", message, "a dict with a role and a content", has_default=False
            )
    given = {
        name: _as_data(value) for name, value in options.items() if name in _CHAT_ONLY and value is not None
    }
    if sees_images:
        messages = [with_image_urls(message) for message in messages]
    request = convert({**given, "messages": [_as_data(message) for message in messages]}, ChatRequest)
    checked, warnings = template_messages(
        request.messages, strict=False, limits=limits, sees_images=sees_images
    )
    conversation = chat_conversation(request, checked, spec, warnings)
    for warning in warnings:
        logger.warning("%s", warning)
    return conversation


def _as_data(value: object) -> object:
    """Mappings as dicts and sequences as lists, inside each other too."""
    if isinstance(value, Mapping):
        return {str(key): _as_data(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_as_data(inner) for inner in value]
    return value


_CHAT_ONLY = ChatOptions.__annotations__.keys() - CallOptions.__annotations__.keys()


def checked_options(
    options: SchedulingOptions,
    lora_id_of: Callable[[str | None], str],
    known: type[SchedulingOptions],
) -> Scheduling:
    """The options, verified.

    Args:
        options: of a call.
        lora_id_of: the fingerprint of an adapter by its name.
        known: the options that the call has.

    Raises:
        TypeError: there is no such option.
        RequestError: a value has the wrong type or is out of range.
    """
    names = known.__annotations__
    unknown = sorted(options.keys() - names.keys())
    if unknown:
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}; {_use_instead(unknown[0], names)}")
    values: dict[str, Any] = {name: plain(value) for name, value in options.items() if name in _KINDS}
    for name, value in values.items():
        kinds, words = _KINDS[name]
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise RequestError(
                f"{name} is {value!r}, but it must be {words}", param=name, code="invalid_type"
            )
        if isinstance(value, str):
            check_text(name, value)
    return Scheduling(
        priority=checked_priority(values.get("priority")),
        tenant=values.get("tenant", ""),
        extra_key=checked_salt(values.get("cache_salt", "")) or "",
        queue_timeout_s=checked_timeout(values.get("queue_timeout"), "queue_timeout"),
        timeout_s=checked_timeout(values.get("timeout"), "timeout"),
        lora_id=lora_id_of(values.get("lora")),
    )


def _use_instead(name: str, known: Iterable[str]) -> str:
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    if name in ChatOptions.__annotations__:
        return "it is an option of `chat`"
    fields = SamplingParams.__struct_fields__
    word = _FIELDS_ELSEWHERE.get(name, name)
    near = difflib.get_close_matches(word, [*fields, *known], n=1)
    if near and near[0] in fields:
        return f"it is a field of the sampling parameters: params=SamplingParams({near[0]}=...)"
    return f"did you mean {near[0]!r}?" if near else f"the options of a call are {', '.join(known)}"


def checked_constraint(options: CallOptions, config: EngineConfig) -> Constraint | None:
    """The constraint on the answers; None for free text.

    Raises:
        RequestError: a value has the wrong type, or is no schema or grammar; or there are two constraints.
    """
    given = {name: value for name in _CONSTRAINTS if (value := options.get(name)) is not None}
    if "json_schema" not in given and hasattr(given.get("response_format"), "model_json_schema"):
        given["json_schema"] = given.pop("response_format")
    schema: Any = given.get("json_schema")
    is_class = hasattr(
        schema, "model_json_schema"
    )  # of pydantic: it has no other fields, and does not say so
    if is_class:
        given["json_schema"] = schema.model_json_schema()
    if "choice" in given:
        given["guided_choice"] = given.pop("choice")
    if not given:
        return None
    names = {"guided_choice": "choice"}
    with renamed_fields(names):
        fields = convert(given, ConstraintFields)
        found = constraint_of(
            fields, config.answers, config.limits, strict_server=config.server.strict, closed=is_class
        )
    return found and found._replace(use=replace(found.use, param=renamed_text(found.param, names)))


_ELSEWHERE: Final = {
    "sampling_params": "the sampling parameters are `params`",
    "use_tqdm": "use progress_bar",
    "prompt": "the prompts of `generate` are `prompts`",
    "prompt_token_ids": "token ids are prompts: generate([1, 2, 3])",
    "input_ids": "token ids are prompts: generate([1, 2, 3])",
    "n": "several answers to one prompt come from LLM.sample(prompt, n)",
    "guided_decoding": "use json_schema, regex, choice or grammar",
    "structured_outputs": "use json_schema, regex, choice or grammar",
    "lora_request": "use lora='NAME', the name of an adapter of LLM(lora=['NAME=PATH']) or of load_adapter(NAME, PATH)",
    "lora_path": "use lora='NAME', the name of an adapter of LLM(lora=['NAME=PATH']) or of load_adapter(NAME, PATH)",
    "model": "it is given to LLM: LLM(model)",
}
"""Arguments of calls in vLLM and SGLang -> what to use."""
_FIELDS_ELSEWHERE: Final = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
_CONSTRAINTS = ("response_format", "json_schema", "regex", "choice", "grammar")
_SECONDS: tuple[tuple[type, ...], str] = ((int, float, type(None)), "a number of seconds")
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "priority": ((int, str), "an integer or a class"),
    "tenant": ((str,), "a text"),
    "cache_salt": ((str,), "a text"),
    "queue_timeout": _SECONDS,
    "timeout": _SECONDS,
    "lora": ((str, type(None)), "the name of an adapter"),
}
