"""`pointer_at_end`: where in a JSON document the end of an unfinished text is."""

from __future__ import annotations

import json

from .schema.report import pointer_to


class _Container:
    """An open object or list; `step`: the name or index of the value at the end, None between values of an object."""

    __slots__ = ("is_object", "name", "step")

    def __init__(self, is_object: bool) -> None:
        self.is_object = is_object
        self.name = ""  # of an object: the last string that may be a name, with its quotes
        self.step: str | int | None = None if is_object else 0


def pointer_at_end(text: str) -> str:
    """The JSON pointer of the value that the end of a JSON text is in or directly before.

    Between the members of an object it is that of the object. The text is taken for the beginning of a JSON document.
    """
    open_: list[_Container] = []
    string_start: int | None = None
    is_escaped = False
    for position, char in enumerate(text):
        if string_start is not None:
            if is_escaped:
                is_escaped = False
            elif char == "\\":
                is_escaped = True
            elif char == '"':
                if open_:
                    open_[-1].name = text[string_start : position + 1]
                string_start = None
        elif char == '"':
            string_start = position
        elif char in "{[":
            open_.append(_Container(char == "{"))
        elif char in "}]":
            if open_:
                open_.pop()
        elif char == ":" and open_:
            open_[-1].step = _parsed(open_[-1].name)
        elif char == "," and open_:
            inner = open_[-1]
            inner.step = None if inner.is_object or not isinstance(inner.step, int) else inner.step + 1
    return pointer_to("", *(each.step for each in open_ if each.step is not None))


def _parsed(name: str) -> str:
    try:
        value = json.loads(name)
    except ValueError:
        return name
    return value if isinstance(value, str) else name
