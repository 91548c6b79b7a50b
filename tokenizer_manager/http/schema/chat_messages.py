"""Chat messages of clients, checked one by one and converted to the form that templates expect."""

from __future__ import annotations

import json
from typing import Any, Final, Literal

import msgspec

from ....runtime.config.request_limits import RequestLimits
from ....runtime.errors import RequestError
from .field_policy import FieldPolicy, first_warnings
from .json_body import Body, convert, show, without_nulls
from .limits import check_limit
from .media_parts import check_is_no_media

_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_RENAMED: Final = {"developer": "system", "function": "tool"}


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, in the spelling of vLLM's newest
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None  # the old form of one tool call


class TextPart(msgspec.Struct, kw_only=True):
    """A text part of a message's content, the only supported kind."""

    type: Literal["text"]
    text: str


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
)
_PART_POLICY: Final = FieldPolicy(
    TextPart,
    {
        "audio_url": (),
        "file": (),
        "image": (),
        "image_url": (),
        "input_audio": (),
        "refusal": (),
        "video": (),
        "video_url": (),
    },
    no_effect={"annotations", "cache_control", "id"},
)


def template_messages(
    messages: list[Body], *, strict: bool, limits: RequestLimits
) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages for the template, and warnings for the response.

    `developer` becomes `system`, the name that templates use; text parts are joined by newlines; old function calls
    become tool calls.

    Raises:
        RequestError: a message is invalid or not supported; names its path.
    """
    if not messages:
        raise RequestError(
            "messages is empty; a chat has at least one message", param="messages", code="empty_prompt"
        )
    check_limit("messages", len(messages), "messages", limits.max_messages, "max_messages")
    rendered: list[dict[str, Any]] = []
    warnings: list[str] = []
    for i, raw in enumerate(messages):
        at = f"messages[{i}]"
        warnings += _MESSAGE_POLICY.check(raw, strict=strict, at=at)
        message = convert(raw, ChatMessage, at)
        role = _checked_role(message.role, at)
        calls = _tool_calls(message, role, at)
        if isinstance(message.content, list):
            text, more_warnings = _joined(message.content, f"{at}.content", strict)
            warnings += more_warnings
        else:
            text = _text_of(message, role, at)
        fields: dict[str, Any] = {"role": role, "content": text}
        if message.name is not None:
            fields["name"] = message.name
        reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
        if reasoning is not None:
            fields["reasoning_content"] = reasoning
        if calls:
            fields["tool_calls"] = calls
        if message.tool_call_id is not None:
            fields["tool_call_id"] = message.tool_call_id
        rendered.append(fields)
    return rendered, first_warnings(warnings)


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


def _text_of(message: ChatMessage, role: str, at: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if role in ("assistant", "tool"):  # calls without text, a tool without a result
        return ""
    raise RequestError(
        f"{at}.content is missing; a {message.role} message must have it",
        param=f"{at}.content",
        code="missing_field",
    )


def _joined(parts: list[dict[str, Any]], at: str, strict: bool) -> tuple[str, list[str]]:
    """The text of a list of parts, and warnings."""
    texts: list[str] = []
    warnings: list[str] = []
    for i, part in enumerate(parts):
        where = f"{at}[{i}]"
        kind = part.get("type")
        if kind != "text":
            check_is_no_media(kind, where)
            raise RequestError(
                f'{where}.type is {show(kind)}, but only "text" is supported yet',
                param=f"{where}.type",
                code="unsupported_value",
            )
        warnings += _PART_POLICY.check(part, strict=strict, at=where)
        texts.append(convert(part, TextPart, where).text)
    return "\n".join(texts), first_warnings(warnings)
