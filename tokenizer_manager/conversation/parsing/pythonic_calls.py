"""The reader of calls as Python writes them: `get_weather(city="Paris", days=3)`. Values become JSON one by one."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator
from typing import Final

from .emitter import Emitter
from .families import ToolFamily
from .json_calls import begin_known
from .source import Source, Trouble, Waits

_MAX_NAME_CHARS: Final = 160
_STRUCTURE: Final = re.compile(r"""["'()\[\]{},\\]""")


def read_pythonic_call(source: Source, emitter: Emitter, family: ToolFamily) -> Waits:
    """Read a call with keyword arguments.

    Raises:
        Trouble: the text is none, the name is of no tool, or the text ends before the call.
    """
    yield from source.skip_space()
    name = yield from source.name(_MAX_NAME_CHARS)
    if name not in emitter.tools or not (yield from source.literal("(")):
        raise Trouble
    begin_known(source, emitter, name)
    opening = "{"
    while True:
        yield from source.skip_space()
        if (yield from source.literal(")")):
            break
        try:
            key = yield from source.name(_MAX_NAME_CHARS)
            if not (yield from source.pieces(("=",))):
                raise Trouble
        except Trouble:
            if source.at_end:
                raise
            break
        value = yield from _read_value(source)
        emitter.arguments(f"{opening}{json.dumps(key)}: {_json_of(value)}")
        opening = ", "
        yield from source.literal(",")
    emitter.arguments("{}" if opening == "{" else "}")
    emitter.end_call()


def _read_value(source: Source) -> Generator[None, None, str]:
    """The text of a literal, up to the comma or bracket that follows it."""
    parts: list[str] = []
    depth = 0
    quote = ""
    escaped = False
    while True:
        pos = source.pos
        while (match := _STRUCTURE.search(source.text, pos)) is not None:
            char, begin = match[0], match.start()
            if escaped and begin == pos:
                escaped = False
                pos = begin + 1
                continue
            escaped = False
            if not quote and not depth and char in ",)":
                parts.append(source.text[source.pos : begin])
                source.pos = begin
                return "".join(parts)
            pos = begin + 1
            if char == "\\":
                escaped = bool(quote)
            elif quote:
                quote = "" if char == quote else quote
            elif char in "\"'":
                quote = char
            elif char in "([{":
                depth += 1
            elif char in ")]}":
                depth -= 1
        escaped = escaped and pos == len(source.text)
        parts.append(source.rest())
        if source.final:
            raise Trouble
        yield


def _json_of(text: str) -> str:
    """JSON of a Python or JSON literal; a text that is neither becomes a string."""
    text = text.strip()
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text
