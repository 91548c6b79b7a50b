"""Readers of calls with JSON arguments: `{"name": ..., "arguments": {...}}`, and a name followed by JSON.

The bytes of the arguments pass through as the model wrote them, but for what is no JSON (`JsonRepair`).
"""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Final

from .emitter import Emitter
from .families import ToolFamily
from .json_text import JsonScanner
from .source import Source, Trouble, Waits

_MAX_NAME_CHARS: Final = 160
_MAX_KEY_CHARS: Final = 1024
_MAX_HELD_CHARS: Final = 16 << 10  # of arguments in front of the name
_FIRST_KEYS: Final = frozenset({"name", "type", "id", "function"})


def read_json_call(source: Source, emitter: Emitter, family: ToolFamily) -> Waits:
    """Read an object with the name and the arguments, in any order.

    Raises:
        Trouble: it is no such object, or the name is of no tool.
    """
    if not (yield from source.literal("{")):
        raise Trouble
    begun = False
    held: str | None = None
    is_first = True
    while True:
        yield from source.skip_space()
        if (yield from source.literal("}")):
            break
        if not is_first:
            if not (yield from source.literal(",")):
                raise Trouble
            yield from source.skip_space()
        key = yield from read_string(source)
        if is_first and family.at_start and key not in _FIRST_KEYS:
            raise Trouble
        is_first = False
        yield from source.skip_space()
        if not (yield from source.literal(":")):
            raise Trouble
        yield from source.skip_space()
        if not family.name_key and not begun:  # the name is the key of the arguments
            begin_known(source, emitter, key)
            begun, held = True, (yield from _read_arguments(source, emitter, True))
        elif key in ("name", family.name_key) and not begun:
            begin_known(source, emitter, (yield from read_string(source)))
            begun = True
            if held is not None:
                emitter.arguments(held)
        elif key in family.arguments_keys and held is None:
            held = yield from _read_arguments(source, emitter, begun)
        else:
            yield from collect_value(source, _MAX_HELD_CHARS)
    if not begun:
        raise Trouble
    emitter.end_call()


def read_named_call(source: Source, emitter: Emitter, family: ToolFamily) -> Waits:
    """Read a name and its arguments.

    Raises:
        Trouble: the text is none, or the name is of no tool.
    """
    yield from begin_named(source, emitter, family)
    yield from source.skip_space()
    if (yield from source.peek()) == "{":
        yield from stream_value(source, emitter)
    emitter.end_call()


def begin_named(source: Source, emitter: Emitter, family: ToolFamily) -> Waits:
    """Read a name and what follows it, up to the arguments; begin the call.

    Raises:
        Trouble: the text is none, or the name is of no tool.
    """
    yield from source.skip_space()
    name = (yield from source.name(_MAX_NAME_CHARS)).removeprefix(family.name_prefix)
    if family.indexed_name and name not in emitter.tools:
        name = name.rpartition(":")[0]
    if name not in emitter.tools:
        raise Trouble
    if (yield from source.literal("[CALL_ID]")):
        yield from source.name(_MAX_NAME_CHARS)
    if not (yield from source.pieces(family.arguments_begin)):
        raise Trouble
    begin_known(source, emitter, name)


def begin_known(source: Source, emitter: Emitter, name: str) -> None:
    """Begin a call; from here on, the text is not content any more.

    Raises:
        Trouble: no tool has this name.
    """
    if name not in emitter.tools:
        raise Trouble
    source.mark = None
    emitter.begin_call(name)


def stream_value(source: Source, emitter: Emitter) -> Waits:
    """Pass a JSON value on as arguments.

    Raises:
        Trouble: the text ends before the value.
    """
    scanner = JsonScanner()
    while True:
        end, done = scanner.scan(source.text, source.pos)
        emitter.arguments(source.text[source.pos : end])
        source.pos = end
        if done:
            return
        if source.final:
            raise Trouble
        yield


def collect_value(source: Source, max_chars: int) -> Generator[None, None, str]:
    """Read a whole JSON value.

    Raises:
        Trouble: the text ends before the value, or the value has more than `max_chars` characters.
    """
    scanner = JsonScanner()
    parts: list[str] = []
    size = 0
    while True:
        end, done = scanner.scan(source.text, source.pos)
        parts.append(source.text[source.pos : end])
        size += end - source.pos
        source.pos = end
        if size > max_chars or (source.final and not done):
            raise Trouble
        if done:
            return "".join(parts)
        yield


def _read_arguments(source: Source, emitter: Emitter, begun: bool) -> Generator[None, None, str]:
    """Pass the arguments on, if the call has begun; otherwise they are returned.

    Raises:
        Trouble: the text ends before them; or they are no object, and the call has not begun.
    """
    if (yield from source.peek()) != "{":
        held = _object_of((yield from collect_value(source, _MAX_HELD_CHARS)), begun)
    elif begun:
        yield from stream_value(source, emitter)
        return ""
    else:
        return (yield from collect_value(source, _MAX_HELD_CHARS))
    if begun:
        emitter.arguments(held)
    return held


def read_string(source: Source) -> Generator[None, None, str]:
    """Read a JSON string: a key, or the name of a tool.

    Raises:
        Trouble: none comes.
    """
    if (yield from source.peek()) == '"':
        try:
            text: str = json.loads((yield from collect_value(source, _MAX_KEY_CHARS)))
        except ValueError:
            pass
        else:
            return text
    raise Trouble


def _object_of(value: str, begun: bool) -> str:
    """Arguments that are not an object: JSON in a string, an empty value for none; others are lost in a begun call."""
    try:
        parsed = json.loads(value)
        if isinstance(parsed, str) and isinstance(json.loads(parsed or "{}"), dict):
            return parsed or "{}"
    except ValueError:
        parsed = value
    if begun or parsed is None or parsed == []:
        return "{}"
    raise Trouble
