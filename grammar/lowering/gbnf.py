"""`gbnf_to_lark`: llama.cpp's grammars (`root ::= ...`) as Lark texts, and which of the two a text is.

GBNF has rules, strings, classes of characters, the dot, groups, the repetitions `* + ? {m,n}` and comments. What does
not refer to a rule becomes one regular expression: llguidance is slow with rules of single characters.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from ..backend import GrammarError
from .lark import NOTHING, quoted

MAX_DEPTH: Final = 100
"""Depth of groups."""

_FIRST_RULE: Final = re.compile(
    r"(?:\s|//[^\n]*|\#[^\n]*)*(?:%\w+[^\n]*\n(?:\s|//[^\n]*|\#[^\n]*)*)*[?!]?([A-Za-z_][\w-]*)[^\n:=\"]*?(::=|:)"
)
_BLANK: Final = re.compile(r"(?:[ \t]|\#[^\n]*)+")
_ANY_BLANK: Final = re.compile(r"(?:\s|\#[^\n]*)+")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_REPEAT: Final = re.compile(r"\{\s*(\d{1,6})\s*(,?)\s*(\d{0,6})\s*\}")
_STRING: Final = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
_CLASS: Final = re.compile(r"\[(\^?)((?:[^\]\\\n]|\\.)*)\]")
_ESCAPE: Final = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_SHORT: Final = {"n": "\n", "r": "\r", "t": "\t"}


def is_gbnf(text: str) -> bool:
    """Whether the first rule has GBNF's sign `::=` instead of Lark's `:`."""
    found = _FIRST_RULE.match(text)
    return (
        found[2] == "::="
        if found is not None
        else "::=" in text and not re.search(r"^\s*start\s*:[^:]", text, re.MULTILINE)
    )


def gbnf_to_lark(text: str, at: str) -> str:
    """A grammar as a Lark text.

    Args:
        text: with a rule `root`.
        at: the client's path, with which messages begin.

    Raises:
        GrammarError: a syntax error, by line; a rule is missing or there twice.
    """
    return _Converter(text, at).converted()


class _Part(NamedTuple):
    """A part of a rule.

    Attributes:
        body: in Lark.
        pattern: as a regular expression, if it is one.
    """

    body: str
    pattern: str | None = None


class _Converter:
    def __init__(self, text: str, at: str) -> None:
        self._text = text
        self._at = at
        self._i = 0
        self._depth = 0
        self._used: dict[str, int] = {}  # name of a rule -> the place of its first use

    def converted(self) -> str:
        bodies: dict[str, str] = {}
        self._skip(_ANY_BLANK)
        while self._i < len(self._text):
            name = self._name()
            if name in bodies:
                raise self._error(f"the rule {name} is there twice")
            self._skip(_BLANK)
            if not self._take("::="):
                raise self._error(f'"::=" is missing after {name}')
            self._skip(_ANY_BLANK)
            bodies[name] = self._alternatives().body
            self._skip(_BLANK)
            if self._i < len(self._text) and self._text[self._i] not in "\r\n":
                raise self._error(f"{self._text[self._i]!r} is not expected")
            self._skip(_ANY_BLANK)
        for name, place in self._used.items():
            if name not in bodies:
                self._i = place
                raise self._error(f"the rule {name} is not defined")
        if "root" not in bodies:
            raise GrammarError(f"{self._at}: the grammar has no rule root", "invalid_grammar", self._at)
        lines = [f"start: {_rule_name('root')}"]
        lines += (f"{_rule_name(name)}: {body}" for name, body in bodies.items())
        return "\n".join(lines) + "\n"

    def _alternatives(self) -> _Part:
        parts = [self._sequence()]
        while self._peek_after_blank("|"):
            self._skip(_ANY_BLANK)
            self._i += 1
            self._skip(_ANY_BLANK)
            parts.append(self._sequence())
        if len(parts) == 1:
            return parts[0]
        patterns = [part.pattern for part in parts]
        body = " | ".join(part.body for part in parts)
        if all(pattern is not None for pattern in patterns):
            pattern = f"(?:{'|'.join(str(each) for each in patterns)})"
            return _Part(_as_regex(pattern), pattern)
        return _Part(body)

    def _sequence(self) -> _Part:
        parts: list[_Part] = []
        while True:
            self._skip(_ANY_BLANK if self._depth else _BLANK)
            part = self._item()
            if part is None:
                break
            parts.append(self._repeated(part))
        if not parts:
            return _Part(NOTHING, "")
        patterns = [part.pattern for part in parts]
        if len(parts) > 1 and all(pattern is not None for pattern in patterns):
            pattern = "".join(str(each) for each in patterns)
            return _Part(_as_regex(pattern), pattern)
        return parts[0] if len(parts) == 1 else _Part(" ".join(part.body for part in parts))

    def _item(self) -> _Part | None:
        text = self._text
        char = text[self._i : self._i + 1]
        if char == '"':
            found = _STRING.match(text, self._i)
            if found is None:
                raise self._error("a string is not closed")
            self._i = found.end()
            literal = self._unescaped(found[1])
            return _Part(quoted(literal), "".join(map(_escaped, literal)))
        if char == "[":
            found = _CLASS.match(text, self._i)
            if found is None or not found[2]:
                raise self._error("a class in brackets is empty or not closed")
            pattern = f"[{found[1]}{self._members(found[2])}]"
            self._i = found.end()
            return _Part(_as_regex(pattern), pattern)
        if char == ".":
            self._i += 1
            return _Part("/(?s:.)/", "(?s:.)")
        if char == "(":
            return self._group()
        if char and (char.isalpha() or char == "_") and char.isascii():
            place = self._i
            name = self._name()
            if self._depth == 0 and self._peek_after_blank(
                "::="
            ):  # the next rule, without a newline before it
                self._i = place
                return None
            self._used.setdefault(name, place)
            return _Part(_rule_name(name))
        return None

    def _group(self) -> _Part:
        start = self._i
        self._i += 1
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"groups are nested more than {MAX_DEPTH} deep")
        self._skip(_ANY_BLANK)
        inner = self._alternatives()
        self._skip(_ANY_BLANK)
        if not self._take(")"):
            self._i = start
            raise self._error("a group is not closed")
        self._depth -= 1
        return _Part(f"({inner.body})", None if inner.pattern is None else f"(?:{inner.pattern})")

    def _repeated(self, part: _Part) -> _Part:
        while True:
            char = self._text[self._i : self._i + 1]
            if char and char in "*+?":
                sign = char
                self._i += 1
            elif char == "{":
                found = _REPEAT.match(self._text, self._i)
                if found is None:
                    raise self._error("{ begins no repetition such as {2,5}")
                least, most = int(found[1]), int(found[3]) if found[3] else None
                if most is not None and most < least:
                    raise self._error(f"{found[0]} has more as its least than as its most")
                sign = f"{{{least}{',' if found[2] else ''}{'' if most is None else most}}}"
                self._i = found.end()
            else:
                return part
            if part.pattern is not None:
                pattern = f"(?:{part.pattern}){sign}"
                part = _Part(_as_regex(pattern), pattern)
            else:
                part = _Part(f"({part.body}){sign}")

    # ------------------------------------------------------------ characters

    def _unescaped(self, text: str) -> str:
        try:
            return _ESCAPE.sub(_character, text)
        except ValueError as error:
            raise self._error(str(error)) from None

    def _members(self, text: str) -> str:
        """The members of a class for a regular expression."""
        parts: list[str] = []
        i = 0
        while i < len(text):
            low, i = self._member(text, i)
            if text.startswith("-", i) and i + 1 < len(text):
                high, i = self._member(text, i + 1)
                if ord(high) < ord(low):
                    raise self._error(f"the range {low}-{high} is reversed")
                parts.append(f"{_escaped(low)}-{_escaped(high)}")
            else:
                parts.append(_escaped(low))
        return "".join(parts)

    def _member(self, text: str, i: int) -> tuple[str, int]:
        found = _ESCAPE.match(text, i)
        return (text[i], i + 1) if found is None else (self._unescaped(found[0]), found.end())

    # ------------------------------------------------------------ reading

    def _name(self) -> str:
        found = _NAME.match(self._text, self._i)
        if found is None:
            raise self._error("the name of a rule is expected")
        self._i = found.end()
        return found[0]

    def _take(self, text: str) -> bool:
        taken = self._text.startswith(text, self._i)
        self._i += len(text) if taken else 0
        return taken

    def _skip(self, blank: re.Pattern[str]) -> None:
        if found := blank.match(self._text, self._i):
            self._i = found.end()

    def _peek_after_blank(self, text: str) -> bool:
        found = _ANY_BLANK.match(self._text, self._i)
        return self._text.startswith(text, found.end() if found else self._i)

    def _error(self, what: str) -> GrammarError:
        line = self._text.count("\n", 0, self._i) + 1
        return GrammarError(f"{self._at}: line {line}: {what}", "invalid_grammar", self._at)


def _rule_name(name: str) -> str:
    """GBNF's names may have capitals, which would be terminals in Lark, and may be called start."""
    small = "".join(f"_{char.lower()}" if char.isupper() else char for char in name)
    return f"r_{small}" if small == name else f"c_{small}"


def _as_regex(pattern: str) -> str:
    return f"/{pattern}/"


def _character(found: re.Match[str]) -> str:
    if found[4] is not None:
        if found[4] in _SHORT or not found[4].isalnum():
            return _SHORT.get(found[4], found[4])
        raise ValueError(f"\\{found[4]} is no escape that is known")
    code = int(found[1] or found[2] or found[3], 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"{found[0]} is no character")
    return chr(code)


def _escaped(char: str) -> str:
    if char.isascii() and not char.isalnum():
        return f"\\{char}" if char.isprintable() and char not in " _<>'\"" else f"\\x{ord(char):02x}"
    return char if char.isprintable() else f"\\u{{{ord(char):x}}}"
