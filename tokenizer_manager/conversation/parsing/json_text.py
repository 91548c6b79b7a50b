"""JSON that arrives in pieces, or was cut: `JsonScanner`, `StringDecoder` and `object_of`.

The scanner finds the end of a value and does not check it. The decoder turns the inside of a JSON string into text.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

_STRUCTURE: Final = re.compile(r'["{}\[\]]')
_IN_STRING: Final = re.compile(r'["\\]')
_END_OF_SCALAR: Final = re.compile(r"[,}\]\s]")
_HEX: Final = re.compile(r"[0-9A-Fa-f]{4}")
_ESCAPES: Final = {
    '"': '"',
    "\\": "\\",
    "/": "/",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
}
_REPLACEMENT: Final = "\ufffd"


class JsonScanner:
    """Finds the end of one JSON value, which begins at the first character given."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_scalar", "_started")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._scalar = False
        self._started = False

    def scan(self, text: str, pos: int) -> tuple[int, bool]:
        """Continue at `pos`; where the value ends in `text`, and whether it is complete there.

        The end of a number or a word is the character after it.
        """
        if not self._started:
            if pos >= len(text):
                return pos, False
            self._started = True
            self._scalar = text[pos] not in '"{['
        if self._scalar:
            match = _END_OF_SCALAR.search(text, pos)
            return (len(text), False) if match is None else (match.start(), True)
        while True:
            if self._in_string:
                if self._escaped:
                    if pos >= len(text):
                        return pos, False
                    pos += 1
                    self._escaped = False
                match = _IN_STRING.search(text, pos)
                if match is None:
                    return len(text), False
                pos = match.end()
                if match[0] == "\\":
                    self._escaped = True
                    continue
                self._in_string = False
                if not self._depth:
                    return pos, True
                continue
            match = _STRUCTURE.search(text, pos)
            if match is None:
                return len(text), False
            pos = match.end()
            char = match[0]
            if char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return pos, True


class StringDecoder:
    """Decodes the inside of a JSON string. Keep what `decode` does not consume, and give it again with more."""

    __slots__ = ()

    def decode(self, text: str, pos: int, final: bool) -> tuple[str, int, bool]:
        """The decoded text, the position of the first character that is not consumed, and whether the string ended.

        Halves of surrogate pairs that stand alone become U+FFFD. At the end of the text, an incomplete escape
        sequence is dropped.
        """
        parts: list[str] = []
        while True:
            match = _IN_STRING.search(text, pos)
            if match is None:
                parts.append(text[pos:])
                return "".join(parts), len(text), False
            parts.append(text[pos : match.start()])
            pos = match.start()
            if match[0] == '"':
                return "".join(parts), pos + 1, True
            char, size = _escape_at(text, pos, final)
            if not size:
                return "".join(parts), len(text) if final else pos, False
            parts.append(char)
            pos += size


def _escape_at(text: str, pos: int, final: bool) -> tuple[str, int]:
    """The character of the escape sequence at `pos` and the size of the sequence; 0 if it is not complete."""
    if pos + 1 >= len(text):
        return "", 0
    kind = text[pos + 1]
    if kind != "u":
        return _ESCAPES.get(kind, kind), 2
    if pos + 6 > len(text):
        return "", 0
    if not _HEX.fullmatch(text, pos + 2, pos + 6):
        return _REPLACEMENT, 2
    code = int(text[pos + 2 : pos + 6], 16)
    if 0xDC00 <= code < 0xE000:
        return _REPLACEMENT, 6
    if not 0xD800 <= code < 0xDC00:
        return chr(code), 6
    following = text[pos + 6 : pos + 12]
    if not final and len(following) < 6 and "\\u".startswith(following[:2]):
        return "", 0
    if following.startswith("\\u") and _HEX.fullmatch(following, 2, 6):
        low = int(following[2:6], 16)
        if 0xDC00 <= low < 0xE000:
            return chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)), 12
    return _REPLACEMENT, 6


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
