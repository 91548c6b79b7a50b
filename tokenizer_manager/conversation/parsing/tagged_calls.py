"""The readers of calls that write each argument by itself; the values become JSON one by one.

Tagged: an element for each argument, `<parameter=city>Paris</parameter>`. Pythonic: as Python writes them,
`get_weather(city="Paris", days=3)`. `Parameters` says of which kinds the values are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Sequence
from typing import Final

from ..parameters import ALL_KINDS, Kinds, Parameters, json_of, parameters_of
from .emitter import Emitter
from .families import ToolFamily
from .json_calls import begin_known, begin_named, collect_value, read_string
from .source import ANYTHING, Markers, Source, Trouble, Waits

MAX_KEY_CHARS: Final = 256
PYTHON_KEY: Final = re.compile(r"[^\s=,()\[\]{}<>\"'\\]*")
"""Names of keyword arguments; those of schemas are more than Python's, as `$filter`."""
_MAX_VALUE_CHARS: Final = 1 << 30
_MAX_QUOTED_DEPTH: Final = 64
_SCALAR_END: Final = re.compile(r"[,\]}]")
_NESTED: Final = {"object": "{", "array": "["}
"""First characters of values that are JSON for sure if the tool is strict."""


def read_tagged_call(source: Source, emitter: Emitter, family: ToolFamily) -> Waits:
    """Read a call: its name and its parameters.

    Raises:
        Trouble: the text is none, the name is of no tool, or the text ends before the call.
    """
    yield from begin_named(source, emitter, family)
    tool = emitter.tools[emitter.current_name]
    parameters = Parameters(parameters_of(tool))
    first, *middle = (piece.strip() for piece in family.parameter_middle if not piece.isspace())
    ends = Markers(_ends(family))
    is_first = True
    while (yield from source.pieces(family.parameter_begin)):
        try:
            key = yield from source.until(first, MAX_KEY_CHARS)
            kinds = parameters.kinds(key)
            is_string = kinds == {"string"}
            if family.string_flag:
                is_string = yield from _read_string_flag(source)
            if not (yield from source.pieces(middle)):
                raise Trouble
        except Trouble:
            break
        if family.newlines:
            yield from source.literal("\n")
        _begin_member(emitter, key, is_first)
        is_first = False
        if is_string:
            yield from _stream_string(source, emitter, ends)
        else:
            begins = [begin for kind, begin in _NESTED.items() if tool.strict and kind in kinds]
            text = yield from _collect(source, ends, begins)
            emitter.arguments(json_of(text, kinds, quoted=family.string_flag))
    ended = yield from source.pieces(family.call_end[:1])
    if not ended and source.at_end:
        raise Trouble  # the answer is cut inside the call
    _end_members(emitter, is_first)


def _begin_member(emitter: Emitter, name: str, is_first: bool) -> None:
    emitter.arguments(f"{'{' if is_first else ', '}{json.dumps(name, ensure_ascii=False)}: ")


def _end_members(emitter: Emitter, are_none: bool) -> None:
    """End the object and the call."""
    emitter.arguments("{}" if are_none else "}")
    emitter.end_call()


def _ends(family: ToolFamily) -> list[str]:
    end = "".join(family.parameter_end).strip()
    return [end, f"\n{end}"] if family.newlines else [end]


def _read_string_flag(source: Source) -> Generator[None, None, bool]:
    if not (yield from source.pieces(('string="',))):
        raise Trouble
    return (yield from source.until('">', MAX_KEY_CHARS)) == "true"


def _stream_string(source: Source, emitter: Emitter, ends: Markers) -> Waits:
    emitter.arguments('"')
    while True:
        text, end = source.before(ends, dropped=ANYTHING)
        emitter.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        if end:
            break
        if source.final:
            raise Trouble
        yield
    emitter.arguments('"')


def _collect(source: Source, ends: Markers, begins: Sequence[str]) -> Generator[None, None, str]:
    """The text of a value. One that begins with any of `begins` is JSON and may have the marker in its strings."""
    parts: list[str] = []
    if begins and (yield from source.peek()) in begins:
        parts.append((yield from collect_value(source, _MAX_VALUE_CHARS)))
    while True:
        text, end = source.before(ends, dropped=ANYTHING)
        parts.append(text)
        if end:
            return "".join(parts)
        if source.final:
            raise Trouble
        yield


_MAX_NAME_CHARS: Final = 160
_STRUCTURE: Final = re.compile(r"""["'()\[\]{},\\]""")


def read_pythonic_call(source: Source, emitter: Emitter, family: ToolFamily) -> Waits:
    """Read a call with keyword arguments.

    Raises:
        Trouble: the text is none, the name is of no tool, or the text ends before the call.
    """
    opening, assign, separator, closing = family.syntax
    yield from source.skip_space()
    name = (yield from source.name(_MAX_NAME_CHARS)).removeprefix(family.name_prefix)
    if name not in emitter.tools or not (yield from source.literal(opening)):
        raise Trouble
    begin_known(source, emitter, name)
    parameters = Parameters(parameters_of(emitter.tools[name]))
    is_first = True
    while True:
        yield from source.skip_space()
        if (yield from source.literal(closing)):
            break
        try:
            if family.quote:
                key = yield from _read_quoted_key(source, family.quote)
            else:
                key = yield from source.name(MAX_KEY_CHARS, PYTHON_KEY)
                if not (yield from source.pieces((assign,))):
                    raise Trouble
        except Trouble:
            if source.at_end:
                raise
            break
        _begin_member(emitter, key, is_first)
        is_first = False
        if family.quote:
            value = yield from _read_quoted_value(source, family.quote, parameters.kinds(key))
        else:
            value = json_of((yield from _read_value(source)).strip(), parameters.kinds(key), quoted=True)
        emitter.arguments(value)
        yield from source.skip_space()
        yield from source.literal(separator.strip())
    _end_members(emitter, is_first)


def _read_quoted_key(source: Source, quote: str) -> Generator[None, None, str]:
    """A key and the colon after it; keys with quotes are read, too."""
    yield from source.skip_space()
    if (yield from source.literal(quote)):
        key = yield from source.until(quote, MAX_KEY_CHARS)
    elif (yield from source.peek()) == '"':
        key = yield from read_string(source)
    else:
        return (yield from source.until(":", MAX_KEY_CHARS)).strip()
    if not (yield from source.pieces((":",))):
        raise Trouble
    return key


def _read_quoted_value(
    source: Source, quote: str, kinds: Kinds = ALL_KINDS, depth: int = 0
) -> Generator[None, None, str]:
    """JSON of a value in Gemma's notation: strings between `quote`, keys without quotes; JSON is read, too."""
    yield from source.skip_space()
    if (yield from source.literal(quote)):
        return json.dumps((yield from source.until(quote, _MAX_VALUE_CHARS)), ensure_ascii=False)
    if source.at_end:
        raise Trouble
    first = source.text[source.pos]
    if first == '"':
        return json_of((yield from collect_value(source, _MAX_VALUE_CHARS)), ALL_KINDS, quoted=True)
    if first not in "[{" or depth > _MAX_QUOTED_DEPTH:
        return json_of((yield from _read_scalar(source)), kinds, quoted=True)
    source.pos += 1
    closing = "]" if first == "[" else "}"
    items: dict[str, str] = {}
    while True:
        yield from source.skip_space()
        if (yield from source.literal(closing)) or source.text.startswith("}", source.pos):
            break  # a list without its bracket ends where the object around it does
        key = str(len(items)) if first == "[" else (yield from _read_quoted_key(source, quote))
        items[key] = yield from _read_quoted_value(source, quote, ALL_KINDS, depth + 1)
        yield from source.skip_space()
        yield from source.literal(",")
    if first == "[":
        return f"[{', '.join(items.values())}]"
    members = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in items.items())
    return f"{{{', '.join(members)}}}"


def _read_scalar(source: Source) -> Generator[None, None, str]:
    """The text up to the separator or the bracket that follows it."""
    parts: list[str] = []
    while True:
        match = _SCALAR_END.search(source.text, source.pos)
        end = len(source.text) if match is None else match.start()
        parts.append(source.text[source.pos : end])
        source.pos = end
        if match is not None:
            text = "".join(parts).strip()
            if not text and match[0] == "]":
                source.pos += 1  # a bracket that closes nothing
            return text
        if source.final:
            raise Trouble
        yield


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
