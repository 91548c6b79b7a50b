"""The readers of calls that write each argument by itself, whose values become JSON one by one.

Tagged: an element for each argument, `<parameter=city>Paris</parameter>`; the schema of the tool says which values are
strings. Pythonic: as Python writes them, `get_weather(city="Paris", days=3)`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator, Mapping
from typing import Any, Final

from ..conversation import Tool
from .emitter import CUSTOM_INPUT, Emitter
from .families import ToolFamily
from .json_calls import begin_known, begin_named
from .source import Markers, Source, Trouble, Waits

_MAX_KEY_CHARS: Final = 256
_WORDS: Final = {"True": "true", "False": "false", "None": "null"}


def read_tagged_call(source: Source, emitter: Emitter, family: ToolFamily) -> Waits:
    """Read a call: its name and its parameters.

    Raises:
        Trouble: the text is none, the name is of no tool, or the text ends before the call.
    """
    yield from begin_named(source, emitter, family)
    properties = _properties(emitter.tools[emitter.current_name])
    first, *middle = (piece.strip() for piece in family.parameter_middle if not piece.isspace())
    ends = Markers(_ends(family))
    opening = "{"
    while (yield from source.pieces(family.parameter_begin)):
        try:
            key = yield from source.until(first, _MAX_KEY_CHARS)
            is_string: bool | None = _is_string(properties.get(key))
            if family.string_flag:
                is_string = yield from _read_string_flag(source)
            if not (yield from source.pieces(middle)):
                raise Trouble
        except Trouble:
            break
        emitter.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
        opening = ", "
        if family.newlines:
            yield from source.literal("\n")
        if is_string:
            yield from _stream_string(source, emitter, ends)
        else:
            emitter.arguments(_value((yield from _collect(source, ends))))
    ended = yield from source.pieces(family.call_end[:1])
    if not ended and source.at_end:
        raise Trouble  # the answer is cut inside the call
    emitter.arguments("{}" if opening == "{" else "}")
    emitter.end_call()


def _properties(tool: Tool) -> Mapping[str, Any]:
    if tool.custom:
        return {CUSTOM_INPUT: {"type": "string"}}
    properties = (tool.parameters or {}).get("properties")
    return properties if isinstance(properties, dict) else {}


def _is_string(schema: object) -> bool | None:
    """Whether values of a schema are strings; None: the schema does not say."""
    if not isinstance(schema, dict):
        return None
    kind = schema.get("type")
    if isinstance(kind, str):
        return kind == "string"
    if isinstance(kind, list):
        return True if kind == ["string"] else None if "string" in kind else False
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return True if all(isinstance(value, str) for value in values) else None
    return None


def _ends(family: ToolFamily) -> list[str]:
    end = "".join(family.parameter_end).strip()
    return [end, f"\n{end}"] if family.newlines else [end]


def _read_string_flag(source: Source) -> Generator[None, None, bool]:
    if not (yield from source.pieces(('string="',))):
        raise Trouble
    return (yield from source.until('">', _MAX_KEY_CHARS)) == "true"


def _stream_string(source: Source, emitter: Emitter, ends: Markers) -> Waits:
    emitter.arguments('"')
    while True:
        text, end = source.before(ends, drop_begun=True)
        emitter.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        if end:
            break
        if source.final:
            raise Trouble
        yield
    emitter.arguments('"')


def _collect(source: Source, ends: Markers) -> Generator[None, None, str]:
    parts: list[str] = []
    while True:
        text, end = source.before(ends, drop_begun=True)
        parts.append(text)
        if end:
            return "".join(parts)
        if source.final:
            raise Trouble
        yield


def _value(text: str) -> str:
    """The JSON of a value that is no string, or may be none."""
    stripped = text.strip()
    stripped = _WORDS.get(stripped, stripped)
    try:
        json.loads(stripped)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return stripped


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
