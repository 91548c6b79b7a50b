"""The reader of calls with an element for each argument: `<parameter=city>Paris</parameter>`.

The arguments become JSON piece by piece; the schema of the tool says which values are strings.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from typing import Any, Final

from ..conversation import Tool
from .emitter import CUSTOM_INPUT, Emitter
from .families import ToolFamily
from .json_calls import begin_named
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
