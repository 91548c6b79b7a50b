"""`TemplateShape`: the chats that a template can show, found at start; `fitted` writes all others so that it can.

Templates are made for one order of messages. What they cannot show they refuse, or they leave it out of the prompt
without a word: a system message that is not the first, two messages of one role, text of the user after the result of a
tool, a text beside calls, ids of calls that another model has made.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

Message = Mapping[str, Any]
Shows = Callable[[Sequence[Message], Sequence[str]], bool]
"""Whether the prompt of a chat has these texts."""

_SEPARATOR: Final = "\n\n"
_SHORT_ID_CHARS: Final = 9
_SHORT_ID: Final = "zq3456789"
_LONG_ID: Final = "call_0123456789abcdef01234567"
_NAMED_ID: Final = "functions.{}:{}"
_ROLES: Final = {"s": "system", "u": "user", "t": "tool", **dict.fromkeys("acbp", "assistant")}


@dataclass(frozen=True, slots=True)
class TemplateShape:
    """Chats that the template can show, beside one of user and assistant in turn.

    Attributes:
        system: a first message of the system.
        later_system: further ones, at the beginning and later.
        repeated_roles: messages of the user, or of the assistant, in a row.
        assistant_first: a chat that the assistant begins.
        no_user: a chat with a message of the system only.
        user_after_tool: a message of the user after the result of a tool.
        open_calls: calls without results, and then a message of the user.
        text_with_calls: a text of the assistant beside calls.
        text_before_calls: such a text in a message of its own, without one of the user between it and the calls.
        parallel_calls: several calls in one message.
        any_ids: ids of calls that are not nine letters and digits.
        call_names: the names of called tools; if not, they are shown as a part of the ids, `functions.NAME:0` (Kimi).
    """

    system: bool = True
    later_system: bool = True
    repeated_roles: bool = True
    assistant_first: bool = True
    no_user: bool = True
    user_after_tool: bool = True
    open_calls: bool = True
    text_with_calls: bool = True
    text_before_calls: bool = True
    parallel_calls: bool = True
    any_ids: bool = True
    call_names: bool = True

    @property
    def missing(self) -> list[str]:
        """Names of the chats that the template cannot show, for the log."""
        return [each.name for each in fields(self) if not getattr(self, each.name)]


def find_shape(shows: Shows) -> TemplateShape:
    """Render short chats; the shape of a template that does not even show one message is the default."""
    arguments: Any = {}

    def can(*chats: str, call_id: str = _SHORT_ID, with_names: bool = False) -> bool:
        for chat in chats:
            messages = _probe(chat, call_id, arguments)
            texts = [str(message["content"]) for message in messages]
            if with_names:
                calls = [call for message in messages for call in message.get("tool_calls", ())]
                texts += [call["function"]["name"] for call in calls]
            if not shows(messages, texts):
                return False
        return True

    if can("ssusuuaasubtuctucu", "aus", "s") and can("uptt", call_id=_LONG_ID, with_names=True):
        return TemplateShape()
    if not can("u"):
        return TemplateShape()
    has_tools = can("uct")
    if not has_tools:  # the template may want JSON text
        arguments = "{}"
        has_tools = can("uct")
    beside, before = can("ubt"), can("uacta")
    after_user = can("uaucta")
    return TemplateShape(
        system=can("su"),
        later_system=can("ssu", "susu", "suas", "suasua"),
        repeated_roles=can("uu", "uuau", "uaau"),
        assistant_first=can("au"),
        no_user=can("s"),
        user_after_tool=can("uctu") or not has_tools,
        open_calls=can("ucu") or not has_tools,
        text_with_calls=beside or not (before or after_user),
        text_before_calls=beside or before or not after_user,
        parallel_calls=can("uptt", with_names=True) or not can("uctct", with_names=True),
        any_ids=can("uct", call_id=_LONG_ID) or not has_tools,
        call_names=can("uct", with_names=True) or not can("uct", call_id=_NAMED_ID, with_names=True),
    )


def _probe(chat: str, call_id: str, arguments: Any) -> list[Message]:
    """A chat of s(ystem), u(ser), a(ssistant), c(all), b(oth), p(arallel calls) and t(ool).

    Each content, and each name of a call, is another one.
    """
    messages: list[Message] = []
    open_ids: list[str] = []
    for index, role in enumerate(chat):
        message: dict[str, Any] = {"role": _ROLES[role], "content": f"zq{index}qz"}
        if role in "cbp":
            names = [f"zq{index}{number}f" for number in range(1 + (role == "p"))]
            open_ids = [
                call_id.format(name, number) if call_id == _NAMED_ID else f"{call_id[:-1]}{number}"
                for number, name in enumerate(names)
            ]
            message["tool_calls"] = [
                {"id": each, "type": "function", "function": {"name": name, "arguments": arguments}}
                for each, name in zip(open_ids, names, strict=True)
            ]
            if role != "b":
                message["content"] = ""
        elif role == "t":
            message |= {"tool_call_id": open_ids.pop(0), "name": "f"}
        messages.append(message)
    return messages


def fitted(messages: Sequence[Message], shape: TemplateShape) -> Sequence[Message]:
    """The messages in a form that the template shows, with all of their contents."""
    if not shape.missing:
        return messages
    if not shape.any_ids:
        messages = [_with_short_ids(message) for message in messages]
    if not shape.call_names:
        messages = _with_named_ids(messages)
    if not shape.text_with_calls:
        messages = [part for message in messages for part in _without_text(message, shape)]
    messages = _with_systems(messages, shape)
    if not shape.open_calls:
        messages = _with_results(messages)
    if not shape.parallel_calls:
        messages = _one_by_one(messages)
    result: list[Message] = []
    for message in _with_user(messages, shape):
        last, role = result[-1] if result else {}, message.get("role")
        after_tool = not shape.user_after_tool and (last.get("role"), role) == ("tool", "user")
        repeated = not shape.repeated_roles and role in ("user", "assistant") and last.get("role") == role
        if message.get("tool_calls"):  # two messages that were one
            repeated = repeated and (
                shape.parallel_calls if last.get("tool_calls") else shape.text_with_calls
            )
        if after_tool or repeated:
            result[-1] = _joined(last, message)
        else:
            result.append(message)
    return result


def _with_user(messages: Sequence[Message], shape: TemplateShape) -> list[Message]:
    """The messages with an empty one of the user where the template wants one at the beginning, or at all."""
    roles = [message.get("role") for message in messages]
    first = next((index for index, role in enumerate(roles) if role != "system"), len(roles))
    begins = first < len(roles) and roles[first] != "user"
    if (begins and not shape.assistant_first) or ("user" not in roles and not shape.no_user):
        return [*messages[:first], {"role": "user", "content": ""}, *messages[first:]]
    return list(messages)


def _with_systems(messages: Sequence[Message], shape: TemplateShape) -> Sequence[Message]:
    """The messages with those of the system at the beginning only, or not at all; the others are the user's.

    A message of the system between a call and its result comes after the result.
    """
    if shape.later_system:
        return messages
    result: list[Message] = []
    held: Message | None = None
    for message in messages:
        role = message.get("role")
        if role == "system":
            if not result and shape.system:
                result.append(message)
            elif len(result) == 1 and result[0].get("role") == "system":
                result[0] = _joined(result[0], message)
            else:
                message = {**message, "role": "user"}
                held = message if held is None else _joined(held, message)
            continue
        if held is not None and role != "tool":
            message, waiting = (_joined(held, message), None) if role == "user" else (message, held)
            held = None
            if waiting is not None:
                result.append(waiting)
        result.append(message)
    return result if held is None else [*result, held]


def _with_results(messages: Sequence[Message]) -> list[Message]:
    """The messages with an empty result for each call that has none, and with other results as text of the user."""
    result: list[Message] = []
    open_ids: list[str] = []
    for message in messages:
        if message.get("role") != "tool":
            result += [{"role": "tool", "tool_call_id": each, "content": ""} for each in open_ids]
            open_ids = [str(call.get("id", "")) for call in message.get("tool_calls") or ()]
            result.append(message)
        elif (call_id := str(message.get("tool_call_id", ""))) in open_ids:
            open_ids.remove(call_id)
            result.append(message)
        else:
            result.append({"role": "user", "content": message.get("content")})
    return result


def _one_by_one(messages: Sequence[Message]) -> list[Message]:
    """The messages with each of several calls in a message of its own, followed by its result."""
    result: list[Message] = []
    index = 0
    while index < len(messages):
        message, index = messages[index], index + 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            result.append(message)
            continue
        end = index
        while end < len(messages) and messages[end].get("role") == "tool":
            end += 1
        results, index = list(messages[index:end]), end
        for number, call in enumerate(calls):
            result.append(
                {**message, "content": "" if number else message.get("content"), "tool_calls": [call]}
            )
            own = [each for each in results if each.get("tool_call_id") == call.get("id")]
            results = [each for each in results if each not in own]
            result += own
        result += results
    return result


def _without_text(message: Message, shape: TemplateShape) -> list[Message]:
    """A message with calls as one with its text and one with the calls; roles that must alternate do."""
    if not message.get("tool_calls") or not message.get("content"):
        return [message]
    between: list[Message] = [] if shape.text_before_calls else [{"role": "user", "content": ""}]
    return [{"role": "assistant", "content": message["content"]}, *between, {**message, "content": ""}]


def _joined(first: Message, second: Message) -> Message:
    """One message with the contents of both."""
    joined = {**second, **first}
    for key in ("content", "reasoning_content"):
        texts = [text for text in (first.get(key), second.get(key)) if text]
        if texts and all(isinstance(text, str) for text in texts):
            joined[key] = _SEPARATOR.join(texts)
        elif texts:  # lists of parts
            joined[key] = [part for text in texts for part in _parts(text)]
    if calls := [*(first.get("tool_calls") or ()), *(second.get("tool_calls") or ())]:
        joined["tool_calls"] = calls
    return joined


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _with_short_ids(message: Message) -> Message:
    """The message with ids of nine letters and digits; equal ids stay equal."""
    changed = dict(message)
    if "tool_call_id" in message:
        changed["tool_call_id"] = _short_id(message["tool_call_id"])
    if message.get("tool_calls"):
        changed["tool_calls"] = [{**call, "id": _short_id(call.get("id"))} for call in message["tool_calls"]]
    return changed


def _with_named_ids(messages: Sequence[Message]) -> list[Message]:
    """The messages with ids that have the name of the tool, and the number of the call in the chat."""
    ids: dict[str, str] = {}
    result: list[Message] = []
    count = 0
    for message in messages:
        changed = dict(message)
        if calls := message.get("tool_calls"):
            changed["tool_calls"] = []
            for number, call in enumerate(calls, count):
                name, old = call["function"]["name"], str(call.get("id"))
                is_named = re.fullmatch(rf"functions\.{re.escape(name)}:\d+", old) is not None
                ids[old] = old if is_named else _NAMED_ID.format(name, number)
                changed["tool_calls"].append({**call, "id": ids[old]})
            count += len(calls)
        if (call_id := str(message.get("tool_call_id"))) in ids:
            changed["tool_call_id"] = ids[call_id]
        result.append(changed)
    return result


def _short_id(call_id: object) -> str:
    text = str(call_id)
    if len(text) == _SHORT_ID_CHARS and text.isascii() and text.isalnum():
        return text
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:_SHORT_ID_CHARS]
