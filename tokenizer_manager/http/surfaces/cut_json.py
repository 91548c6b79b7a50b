"""`object_of`: the arguments of a call as an object, for the APIs that do not send them as text."""

from __future__ import annotations

import json
from typing import Any, Final

_CLOSER: Final = {"{": "}", "[": "]"}


def object_of(arguments: str) -> dict[str, Any]:
    """The object in a text; of a text that was cut, the members that are complete; {} if there are none."""
    if (value := _parsed(arguments)) is None:
        value = _parsed(_closed(arguments))
    return value or {}


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _closed(text: str) -> str:
    """The longest beginning that ends between two members or items, with its objects and lists closed."""
    stack: list[str] = []
    end, closers = 0, ""
    in_string = is_escaped = False
    for position, char in enumerate(text):
        if in_string:
            in_string = is_escaped or char != '"'
            is_escaped = char == "\\" and not is_escaped
            continue
        if char == '"':
            in_string = True
        elif char in _CLOSER:
            stack.append(_CLOSER[char])
        elif char in "}]" and stack:
            stack.pop()
        if char in "{[}],":
            end = position + (char != ",")
            closers = "".join(reversed(stack))
    return text[:end] + closers
