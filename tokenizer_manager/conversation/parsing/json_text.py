"""JSON that arrives in pieces, or was cut: `JsonScanner`, `JsonRepair`, `StringDecoder` and `object_of`.

The scanner finds the end of a value and does not check it; the repair makes it JSON that every client reads. The
decoder turns the inside of a JSON string into text.
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


_TOKEN: Final = re.compile(r'\s+|[{}\[\],:"]|[^\s{}\[\],:"]+')
_STRING: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS: Final = {**{word: word for word in ("true", "false", "null")}, "True": "true", "False": "false"}
_CONTROL: Final = {code: f"\\u{code:04x}" for code in range(32)}


class JsonRepair:
    """Passes one JSON value on as it is, but for what JSON does not have or clients do not take.

    NaN, infinities and other bare words become strings, Python's words become JSON's; of two members of one name the
    first stays; a comma in front of a bracket is dropped; control characters in strings are escaped.
    """

    __slots__ = ("_held", "_in_string", "_missing", "_num_skipped", "_pending", "_stack", "_wants_key")

    def __init__(self) -> None:
        self._held = ""  # the beginning of a token
        self._pending = ""  # a comma, and the space after it
        self._stack: list[set[str] | None] = []  # open objects with the names so far, and arrays
        self._in_string = False
        self._wants_key = False
        self._missing = ""  # of the last member: its value, and the colon in front of it
        self._num_skipped = 0  # size of the stack at the member that is left out; 0: none is

    def feed(self, text: str) -> str:
        """The JSON that is certain with this text."""
        text, self._held = self._held + text, ""
        parts: list[str] = []
        pos = 0
        while pos < len(text):
            if self._in_string:
                match = _IN_STRING.search(text, pos)
                end = len(text) if match is None else match.end()
                if match is not None and match[0] == "\\":
                    begin, end = match.start(), end + (5 if text.startswith("u", end) else 1)
                    if end > len(text):  # the escape sequence is not complete
                        self._put(parts, text[pos:begin])
                        self._held = text[begin:]
                        break
                self._put(parts, text[pos:end])
                self._in_string = match is None or match[0] == "\\"
                pos = end
                continue
            token = _TOKEN.match(text, pos)
            assert token is not None
            end = token.end()
            if token[0] == '"' and self._wants_key:
                string = _STRING.match(text, pos)
                if string is None:
                    self._held = text[pos:]
                    break
                end = string.end()
                self._key(parts, string[0])
            elif not token[0].isspace() and token[0] not in '{}[],:"':
                if end == len(text):
                    self._held = token[0]
                    break
                self._word(parts, token[0])
            else:
                self._mark(parts, token[0])
            pos = end
        return "".join(parts)

    def cut(self) -> str:
        """The text that was held back, as it came: the value is not complete, and nothing more comes."""
        return "" if self._num_skipped else self._pending + self._held

    def end(self) -> str:
        """The text that was held back, and the end of everything that is open."""
        parts: list[str] = []
        if self._held and not self._in_string and not self._held.startswith('"'):
            self._word(parts, self._held)
        if self._in_string:
            self._put(parts, '"')
        if self._missing:
            self._put(parts, self._missing)
        self._num_skipped, self._pending = 0, ""
        parts += ["]" if names is None else "}" for names in reversed(self._stack)]
        self._stack = []
        return "".join(parts)

    def _put(self, parts: list[str], text: str) -> None:
        if not self._num_skipped:
            parts += (self._pending, text.translate(_CONTROL) if self._in_string else text)
            self._pending = ""

    def _mark(self, parts: list[str], mark: str) -> None:
        """A bracket, a comma, a colon, a quote, or space."""
        if mark in "]}":
            if len(self._stack) == self._num_skipped:
                self._num_skipped = 0
            self._pending = self._pending[1:]
            self._stack[-1:] = []
        elif mark == ",":
            if len(self._stack) == self._num_skipped:
                self._num_skipped = 0
            self._pending = mark
            self._wants_key = bool(self._stack) and self._stack[-1] is not None
            return
        elif mark.isspace() and self._pending:
            self._pending += mark
            return
        self._put(parts, mark)
        if mark in "{[":
            self._stack.append(set() if mark == "{" else None)
        self._in_string = mark == '"'
        self._wants_key = mark == "{" or (self._wants_key and mark.isspace())
        if not mark.isspace():
            self._missing = "null" if mark == ":" else ""

    def _key(self, parts: list[str], text: str) -> None:
        self._wants_key, self._missing = False, ": null"
        try:
            name = json.loads(text, strict=False)
        except ValueError:
            name = text
        names = self._stack[-1]
        if names is not None and not self._num_skipped:
            if name in names:
                self._num_skipped, self._pending = len(self._stack), ""
            names.add(name)
        self._put(parts, text)

    def _word(self, parts: list[str], word: str) -> None:
        """A number, or a word without quotes."""
        if self._wants_key:
            self._key(parts, json.dumps(word.strip("'"), ensure_ascii=False))
            return
        self._missing = ""
        is_number = _NUMBER.fullmatch(word)
        text = "null" if word == "None" else word if is_number else _WORDS.get(word)
        self._put(parts, text or json.dumps(word, ensure_ascii=False))


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
