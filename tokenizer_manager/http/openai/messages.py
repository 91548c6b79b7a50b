"""Chat completions to a `Conversation`: messages, checked one by one and as templates expect them, and options."""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec

from ....runtime.config.answer_config import RequestLimits
from ....runtime.errors import RequestError
from ....runtime.grammar_use import GrammarSpec
from ....runtime.sampling_params import MAX_COUNT
from ...conversation.chat_template import RESERVED_NAMES
from ...conversation.conversation import ChoiceMode, Content, Conversation, ReasoningOptions, Tool, ToolChoice
from ..schema.cache_fields import BREAKPOINTS
from ..schema.field_policy import CALL_POLICY, FieldPolicy, Notes, policy_of
from ..schema.image_parts import RequestImages
from ..schema.parts import ONLY_IMAGES, ONLY_TEXT, part_text, reasoning_text, refuse_or_note, result_text
from ..schema.values import EFFORTS, Body, check_limit, convert, objects, refused, show, without_nulls
from .tools import choice_of, function_choice_of, function_of, tools_of
from .wire import ChatRequest

_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_RENAMED: Final = {"developer": "system", "function": "tool"}


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message; its content is a text or a list of parts, and a tool's may be any value."""

    role: str
    content: Any = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, in the spelling of vLLM's newest
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None  # the old form of one tool call


class TextPart(msgspec.Struct, kw_only=True):
    """A text part of a message's content."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None


class _CalledFunction(msgspec.Struct, kw_only=True):
    """The function of a tool call; some clients replay arguments as an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class _CalledCustom(msgspec.Struct, kw_only=True):
    """A call of a custom tool."""

    name: str
    input: str = ""


class _ToolCall(msgspec.Struct, kw_only=True):
    """A tool call of an earlier answer."""

    id: str = ""
    type: str = "function"
    function: _CalledFunction | None = None
    custom: _CalledCustom | None = None


_MESSAGE_POLICY: Final = FieldPolicy(
    ChatMessage,
    {"audio": ()},
    no_effect={"annotations", "id", "refusal"},
    nested={"tool_calls": CALL_POLICY, "function_call": policy_of(("name", "arguments"))},
)
_PART_POLICY: Final = FieldPolicy(
    TextPart,
    {
        "audio_url": (),
        "file": (),
        "image": (),
        "image_url": (),
        "input_audio": (),
        "video": (),
        "video_url": (),
    },
    no_effect={"annotations", "id", *BREAKPOINTS},
)


def template_messages(
    messages: list[Body], *, strict: bool, limits: RequestLimits, sees_images: bool = False
) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages for the template, and warnings for the response.

    `developer` becomes `system`, the name that templates use; text parts are joined by newlines, parts with reasoning
    become `reasoning_content`; old function calls become tool calls.

    Args:
        sees_images: messages of the user may have images; their parts stay apart.

    Raises:
        RequestError: a message is invalid or not supported; names its path.
    """
    if not messages:
        raise RequestError(
            "messages is empty; a chat has at least one message", param="messages", code="empty_prompt"
        )
    check_limit("messages", len(messages), "messages", limits.max_messages, "max_messages")
    rendered: list[dict[str, Any]] = []
    notes = Notes([], strict=strict)
    call_ids: set[str] = set()
    images = RequestImages(limits) if sees_images else None
    for i, raw in enumerate(messages):
        at = f"messages[{i}]"
        notes.check(_MESSAGE_POLICY, raw, at)
        message = convert(raw, ChatMessage, at)
        role = _checked_role(message.role, at)
        calls = _tool_calls(message, role, at)
        call_ids.update(call["id"] for call in calls)
        if message.role == "tool":
            _check_has_call(message.tool_call_id, call_ids, at)
        content, reasoning = _content(message, role, at, notes, images)
        fields: dict[str, Any] = {"role": role, "content": content}
        if message.name is not None:
            fields["name"] = message.name
        if reasoning is not None:
            fields["reasoning_content"] = reasoning
        if calls:
            fields["tool_calls"] = calls
        if message.tool_call_id is not None:
            fields["tool_call_id"] = message.tool_call_id
        rendered.append(fields)
    return rendered, notes.warnings


def _check_has_call(call_id: str | None, call_ids: set[str], at: str) -> None:
    """Refuse a result whose call is not there; calls and results may leave out their ids."""
    if call_id in call_ids or "" in call_ids or (not call_id and call_ids):
        return
    raise refused(
        f"{at}.tool_call_id",
        f"is {show(call_id)}, but no tool call before it has this id; send the assistant's message with the call, too",
    )


def _checked_role(role: str, at: str) -> str:
    if role in _ROLES:
        return _RENAMED.get(role, role)
    raise RequestError(
        f"{at}.role is {show(role)}, which is unknown; use one of {', '.join(_ROLES)}",
        param=f"{at}.role",
        code="invalid_value",
    )


def _tool_calls(message: ChatMessage, role: str, at: str) -> list[dict[str, Any]]:
    """The calls of an assistant's message, in OpenAI's form."""
    raw = message.tool_calls or []
    if message.function_call:
        raw = [*raw, {"type": "function", "function": message.function_call}]
    if raw and role != "assistant":
        raise RequestError(
            f"{at}.tool_calls is set, but only messages of the assistant have tool calls",
            param=f"{at}.tool_calls",
            code="invalid_value",
        )
    calls = []
    for i, value in enumerate(raw):
        place = f"{at}.tool_calls[{i}]"
        call = convert(_without_nulls_inside(value), _ToolCall, place)
        if call.custom is not None:
            name, arguments = call.custom.name, json.dumps({"input": call.custom.input}, ensure_ascii=False)
        elif call.function is not None:
            name, given = call.function.name, call.function.arguments
            arguments = given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
        else:
            raise RequestError(
                f"{place}.function is missing; a tool call names a function",
                param=f"{place}.function",
                code="missing_field",
            )
        calls.append(
            {"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments or "{}"}}
        )
    return calls


def _without_nulls_inside(call: Body) -> Body:
    """A tool call whose function or custom tool has no null members."""
    return {name: without_nulls(part) if isinstance(part, dict) else part for name, part in call.items()}


def _content(
    message: ChatMessage, role: str, at: str, notes: Notes, images: RequestImages | None
) -> tuple[Content, str | None]:
    """The content of a message, and its reasoning."""
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    content, place = message.content, f"{at}.content"
    if role == "tool":
        return result_text(content, place, notes), reasoning
    if isinstance(content, str):
        return content, reasoning
    if content is None and role == "assistant":  # calls without text
        return "", reasoning
    if content is None:
        raise refused(place, f"is missing; a {message.role} message must have it", "missing_field")
    if not isinstance(content, list):
        raise refused(
            place, f"is {show(content)}, but it must be a string or a list of parts", "invalid_type"
        )
    texts: list[str] = []
    thoughts: list[str] = []
    parts: list[dict[str, Any]] = []
    for where, part in objects(content, place):
        if (text := part_text(part, where)) is not None:
            notes.check(_PART_POLICY, part, where)
            texts.append(text)
            parts.append({"type": "text", "text": text})
        elif (
            role == "user"
            and images is not None
            and (image := images.chat_part(part, where, notes)) is not None
        ):
            parts.append(image)
        elif role == "assistant" and (thought := reasoning_text(part, where)) is not None:
            thoughts.append(thought)
        else:
            rule = ONLY_TEXT if images is None else ONLY_IMAGES
            refuse_or_note(part, where, notes if role == "assistant" else None, rule)
    if thoughts and reasoning is None:
        reasoning = "\n".join(thoughts)
    return "\n".join(texts) if len(parts) == len(texts) else parts, reasoning


def chat_conversation(
    request: ChatRequest, messages: list[dict[str, Any]], spec: GrammarSpec | None, warnings: list[str]
) -> Conversation:
    """The conversation of a chat completion.

    Args:
        request: the body.
        messages: checked, from `template_messages`.
        spec: what the answer is constrained to.
        warnings: get those about tools.

    Raises:
        RequestError: tools, choice or options are invalid.
    """
    tools, choice = tools_and_choice(request, warnings)
    if request.continue_final_message and request.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other; send one of them",
            param="continue_final_message",
            code="invalid_value",
        )
    return Conversation(
        messages=messages,
        tools=tools,
        tool_choice=choice,
        tool_path="functions[{}]" if request.functions else "tools[{}].function",
        spec=spec,
        reasoning=reasoning_options(request)[0],
        variables=checked_template_variables(request.chat_template_kwargs),
        documents=tuple(request.documents or ()),
        continue_final_message=bool(request.continue_final_message),
        add_generation_prompt=request.add_generation_prompt is not False,
    )


def tools_and_choice(request: ChatRequest, warnings: list[str]) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools of a request and the choice among them; the old `functions` are tools.

    Raises:
        RequestError: they are invalid, or given in both forms.
    """
    old = bool(request.functions) or request.function_call not in (None, "")
    if old and (request.tools or request.tool_choice not in (None, "")):
        raise RequestError(
            "functions and function_call are the old form of tools and tool_choice; send only one form",
            param="functions",
            code="invalid_value",
        )
    if old:
        functions = request.functions or ()
        tools = tuple(function_of(each, f"functions[{i}]") for i, each in enumerate(functions))
        return tools, function_choice_of(request.function_call)
    tools = tools_of(request.tools or (), "tools", warnings)
    choice = choice_of(request.tool_choice, request.parallel_tool_calls)
    if choice.mode is ChoiceMode.AUTO and not tools:
        choice = ToolChoice(mode=ChoiceMode.NONE)
    return tools, choice


def reasoning_options(request: ChatRequest) -> tuple[ReasoningOptions, dict[str, str]]:
    """Read the options about reasoning, in the spellings of several APIs.

    Returns:
        The options, and usual names of fields -> the spellings that the client has.

    Raises:
        RequestError: a value is invalid, or two spellings disagree.
    """
    thinking, reasoning = request.thinking or {}, request.reasoning or {}
    efforts: dict[str, object] = {
        "reasoning_effort": request.reasoning_effort or None,
        "reasoning.effort": reasoning.get("effort") or None,
    }
    budgets: dict[str, object] = {
        "thinking_token_budget": request.thinking_token_budget,
        "thinking.budget_tokens": thinking.get("budget_tokens"),
        "reasoning.max_tokens": reasoning.get("max_tokens"),
    }
    enabled = None
    kind = thinking.get("type") or None
    if kind is not None:
        if kind not in ("enabled", "adaptive", "disabled"):
            raise RequestError(
                f"thinking.type is {show(kind)}, but it must be enabled, adaptive or disabled",
                param="thinking.type",
                code="invalid_value",
            )
        enabled = None if kind == "adaptive" else kind == "enabled"
    effort, budget = _only(efforts), _only(budgets)
    options = ReasoningOptions(
        enabled=enabled,
        effort=checked_effort(*effort),
        budget=checked_budget(*budget),
        control=bool(request.reasoning_control),
        include=request.include_reasoning is not False,
        separate=request.separate_reasoning is not False,
        stream=request.stream_reasoning is not False,
    )
    return options, {"reasoning_effort": effort[0], "thinking_token_budget": budget[0]}


def checked_effort(param: str, value: object) -> str | None:
    """An effort, or None.

    Raises:
        RequestError: it is none of `EFFORTS`.
    """
    if value is not None and value not in EFFORTS:
        raise RequestError(
            f"{param} is {show(value)}, but it must be one of {', '.join(EFFORTS)}",
            param=param,
            code="invalid_value",
        )
    return None if value is None else str(value)


def checked_budget(param: str, value: object) -> int | None:
    """A number of tokens, or None.

    Raises:
        RequestError: it is no integer in [0, MAX_COUNT].
    """
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_COUNT:
        raise RequestError(
            f"{param} is {show(value)}, but it must be a number of tokens, from 0 to {MAX_COUNT}",
            param=param,
            code="invalid_value",
        )
    return value


def _only(values: Body) -> tuple[str, object]:
    """The one that is set, with its name; the first one for none."""
    given = [(name, value) for name, value in values.items() if value is not None]
    for name, value in given[1:]:
        if value != given[0][1]:
            raise RequestError(
                f"{given[0][0]} is {show(given[0][1])} and {name} is {show(value)}, but they mean the same; send one",
                param=name,
                code="invalid_value",
            )
    return given[0] if given else next(iter(values.items()))


def checked_template_variables(variables: dict[str, Any] | None) -> dict[str, Any]:
    """`chat_template_kwargs`, which must not replace the variables that the server sets.

    Raises:
        RequestError: it does.
    """
    taken = sorted(RESERVED_NAMES & (variables or {}).keys())
    if taken:
        raise RequestError(
            f"chat_template_kwargs has {show(taken[0])}, which the server sets; leave it out",
            param="chat_template_kwargs",
            code="invalid_value",
        )
    return variables or {}
