"""Chat messages of clients, checked one by one and converted to the form that templates expect."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from ....runtime.config.request_limits import RequestLimits
from ....runtime.errors import RequestError
from .field_policy import FieldPolicy, first_warnings
from .json_body import Body, convert, show
from .limits import check_limit

_ROLES: Final = ("system", "developer", "user", "assistant")
_ROLES_OF_TOOLS: Final = ("tool", "function")


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None


class TextPart(msgspec.Struct, kw_only=True):
    """A text part of a message's content, the only supported kind."""

    type: Literal["text"]
    text: str


_MESSAGE_POLICY: Final = FieldPolicy(
    ChatMessage,
    {"audio": (), "function_call": (), "refusal": (), "tool_call_id": (), "tool_calls": ([],)},
    no_effect={"annotations", "id"},
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
) -> tuple[list[dict[str, str]], list[str]]:
    """Messages for the template, and warnings for the response.

    `developer` becomes `system`, the name that templates use; text parts are joined by newlines.

    Raises:
        RequestError: a message is invalid or not supported; names its path.
    """
    if not messages:
        raise RequestError(
            "messages is empty; a chat has at least one message", param="messages", code="empty_prompt"
        )
    check_limit("messages", len(messages), "messages", limits.max_messages, "max_messages")
    rendered: list[dict[str, str]] = []
    warnings: list[str] = []
    for i, raw in enumerate(messages):
        at = f"messages[{i}]"
        warnings += _MESSAGE_POLICY.check(raw, strict=strict, at=at)
        message = convert(raw, ChatMessage, at)
        role = _checked_role(message.role, at)
        if isinstance(message.content, list):
            text, more_warnings = _joined(message.content, f"{at}.content", strict)
            warnings += more_warnings
        else:
            text = _text_of(message, at)
        fields = {"role": role, "content": text}
        if message.name is not None:
            fields["name"] = message.name
        if message.reasoning_content is not None:
            fields["reasoning_content"] = message.reasoning_content
        rendered.append(fields)
    return rendered, first_warnings(warnings)


def _checked_role(role: str, at: str) -> str:
    if role in _ROLES:
        return "system" if role == "developer" else role
    reason = "is not supported yet" if role in _ROLES_OF_TOOLS else "is unknown"
    raise RequestError(
        f"{at}.role is {show(role)}, which {reason}; use one of {', '.join(_ROLES)}",
        param=f"{at}.role",
        code="invalid_value",
    )


def _text_of(message: ChatMessage, at: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.role == "assistant":
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
            raise RequestError(
                f'{where}.type is {show(kind)}, but only "text" is supported yet',
                param=f"{where}.type",
                code="unsupported_value",
            )
        warnings += _PART_POLICY.check(part, strict=strict, at=where)
        texts.append(convert(part, TextPart, where).text)
    return "\n".join(texts), first_warnings(warnings)
