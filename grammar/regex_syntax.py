"""`checked_regex`: a client's regular expression in the dialect that grammars are compiled from.

Clients write ECMAScript's dialect (`pattern` in JSON Schema) or Python's; llguidance reads Rust's, in which some of the
same characters mean something else: `[a&&b]` is an intersection there. What has one meaning is kept, what has several
is rewritten or refused, so that the compiled expression never matches more than the client's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

MAX_REPEAT: Final = 100_000
MAX_GROUPS: Final = 100
"""Depth of groups: the library's parser is recursive."""

_LOOKS: Final = ("(?=", "(?!", "(?<=", "(?<!")
_CALLS: Final = ("(?P=", "(?P>", "(?R", "(?&", "(?0", "(?1", "(?+", "(?(")
_GROUP_NAME: Final = re.compile(r"\(\?P?<[A-Za-z_][A-Za-z0-9_]*>")
_FLAGS: Final = re.compile(r"\(\?[is]+(?:-[is]+)?([:)])|\(\?-[is]+([:)])")
_REPEAT: Final = re.compile(r"\{(\d+)(,?)(\d*)\}")
_PROPERTY: Final = re.compile(r"\{\^?[A-Za-z0-9_ =:-]+\}|[A-Za-z]")
_HEX: Final = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|[xu]\{([0-9A-Fa-f]{1,6})\}")
_CONTROL: Final = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_LINE_ENDS: Final = r"\n\r\u{2028}\u{2029}"
_BLANKS: Final = r"\t\n\v\f\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}"
"""Characters that `\\s` matches in ECMAScript."""
_SPECIAL: Final = frozenset(r"\.+*?()|[]{}^$#&-~/")


class RegexError(Exception):
    """A regular expression that cannot be used.

    Attributes:
        position: of the cause, counted in characters from 0.
        unsupported: the expression is valid, and has something that no grammar can express.
    """

    def __init__(self, message: str, position: int, *, unsupported: bool = False) -> None:
        super().__init__(f"{message} at character {position}")
        self.position = position
        self.unsupported = unsupported


@dataclass(slots=True)
class _Group:
    """An open group, or the whole expression.

    Attributes:
        begins_at_start: no text comes before the group.
        at_start: no text comes before the current place.
        ended: a `$` stands in the current alternative; its position.
        ended_in_any: a `$` stands at the end of an alternative; its position.
        has_anchor: an anchor stands in it.
    """

    begins_at_start: bool
    at_start: bool
    position: int
    ended: int | None = None
    ended_in_any: int | None = None
    has_anchor: bool = False


def checked_regex(pattern: str, *, whole: bool) -> str:
    """The expression for llguidance.

    Args:
        pattern: of a client.
        whole: it must match the whole text; anchors at the ends are dropped then. If not, it may match anywhere, as
            `pattern` in JSON Schema, and the dot and the shorthands of classes are ECMAScript's.

    Raises:
        RegexError: a syntax error, or a look-around, back-reference, boundary, or another thing that is not regular.
    """
    return _Reader(pattern, whole).read()


class _Reader:
    """Reads an expression from left to right."""

    def __init__(self, pattern: str, whole: bool) -> None:
        self._pattern = pattern
        self._whole = whole
        self._i = 0
        self._out: list[str] = []
        self._groups = [_Group(True, True, 0)]
        self._quantifiable = False  # the last thing may be repeated
        self._repeated = False  # the last thing is a repetition
        self._anchored_group = False  # the last thing is a group with an anchor

    def read(self) -> str:
        pattern = self._pattern
        while self._i < len(pattern):
            char = pattern[self._i]
            if char == "(":
                self._open()
            elif char == ")":
                self._close()
            elif char == "|":
                self._alternative()
            elif char in "*+?{":
                self._repeat(char)
            elif char == "[":
                start = self._i
                self._atom(self._char_class(), start)
            elif char == "^":
                self._begin_anchor("^", 1)
            elif char == "$":
                self._end_anchor("$", 1)
            elif char == "\\":
                self._escape()
            elif char == ".":
                self._i += 1
                self._atom("." if self._whole else f"[^{_LINE_ENDS}]", self._i - 1)
            else:
                self._i += 1
                self._atom(_literal(char), self._i - 1)
        if len(self._groups) > 1:
            raise RegexError("a group is not closed", self._groups[-1].position)
        return "".join(self._out)

    # ------------------------------------------------------------ structure

    def _open(self) -> None:
        start, pattern = self._i, self._pattern
        if pattern.startswith("(?#", start):
            end = pattern.find(")", start)
            if end < 0:
                raise RegexError("a comment is not closed", start)
            self._i = end + 1
            return
        opening = "(?:"
        if pattern.startswith(_LOOKS, start):
            raise RegexError("look-around is not supported", start, unsupported=True)
        if pattern.startswith(_CALLS, start):
            raise RegexError("back-references and calls of groups are not supported", start, unsupported=True)
        if not pattern.startswith("(?", start):
            self._i += 1
        elif pattern.startswith("(?:", start):
            self._i += 3
        elif name := _GROUP_NAME.match(pattern, start):
            self._i = name.end()
        elif flags := _FLAGS.match(pattern, start):
            self._i = flags.end()
            opening = flags[0]
            if (flags[1] or flags[2]) == ")":
                self._out.append(opening)
                self._quantifiable = False
                return
        elif pattern.startswith("(?>", start):
            raise RegexError("atomic groups are not supported", start, unsupported=True)
        else:
            raise RegexError(f"{pattern[start : start + 4]} is no group that is known", start)
        if len(self._groups) > MAX_GROUPS:
            raise RegexError(f"groups are nested more than {MAX_GROUPS} deep", start)
        outer = self._groups[-1]
        if outer.ended is not None:
            raise RegexError("$ in front of more text is not supported", outer.ended, unsupported=True)
        self._groups.append(_Group(outer.at_start, outer.at_start, start))
        self._out.append(opening)
        self._quantifiable = False

    def _close(self) -> None:
        if len(self._groups) == 1:
            raise RegexError("a group is closed that is not open", self._i)
        group = self._groups.pop()
        outer = self._groups[-1]
        outer.ended = group.ended if group.ended is not None else group.ended_in_any
        outer.at_start = False
        outer.has_anchor |= group.has_anchor
        self._out.append(")")
        self._i += 1
        self._quantifiable, self._repeated, self._anchored_group = True, False, group.has_anchor

    def _alternative(self) -> None:
        group = self._groups[-1]
        if group.ended is not None:
            group.ended_in_any = group.ended
        group.ended = None
        group.at_start = group.begins_at_start
        self._out.append("|")
        self._i += 1
        self._quantifiable = False

    def _repeat(self, char: str) -> None:
        start = self._i
        if char == "{":
            found = _REPEAT.match(self._pattern, start)
            if found is None:
                raise RegexError(r"{ begins no repetition such as {2,5}; write \{ for the character", start)
            least = int(found[1])
            most = int(found[3]) if found[3] else (least if not found[2] else None)
            if most is not None and most < least:
                raise RegexError(f"{found[0]} has more as its least than as its most", start)
            if max(least, most or 0) > MAX_REPEAT:
                raise RegexError(f"{found[0]} repeats more than {MAX_REPEAT} times", start)
            text = found[0]
        else:
            text = char
        if not self._quantifiable:
            what = "a repetition" if self._repeated else "nothing"
            raise RegexError(f"{text} repeats {what}", start)
        if self._anchored_group:
            raise RegexError("a repeated ^ or $ is not supported", start, unsupported=True)
        self._i += len(text)
        if self._pattern.startswith("?", self._i):  # lazy: it matches the same texts
            self._i += 1
        elif self._pattern.startswith("+", self._i):
            raise RegexError("possessive repetition is not supported", self._i, unsupported=True)
        self._out.append(text)
        self._quantifiable, self._repeated = False, True

    def _atom(self, text: str, start: int) -> None:
        group = self._groups[-1]
        if group.ended is not None:
            raise RegexError("$ in front of more text is not supported", group.ended, unsupported=True)
        group.at_start = False
        self._out.append(text)
        self._quantifiable, self._repeated, self._anchored_group = True, False, False

    def _begin_anchor(self, text: str, length: int) -> None:
        group = self._groups[-1]
        if not group.at_start:
            raise RegexError(f"{text} after other text is not supported", self._i, unsupported=True)
        if group.ended is not None:
            raise RegexError(f"{text} after $ is not supported", self._i, unsupported=True)
        group.has_anchor = True
        self._anchor("^", length)

    def _end_anchor(self, text: str, length: int) -> None:
        group = self._groups[-1]
        group.has_anchor = True
        if group.ended is None:
            group.ended = self._i
        self._anchor("$", length)

    def _anchor(self, text: str, length: int) -> None:
        if not self._whole:
            self._out.append(text)
        self._i += length
        self._quantifiable = self._repeated = False

    # ------------------------------------------------------------ characters

    def _escape(self) -> None:
        start = self._i
        char = self._pattern[start + 1 : start + 2]
        if char == "A":
            self._begin_anchor(r"\A", 2)
        elif char in ("Z", "z"):
            self._end_anchor(f"\\{char}", 2)
        elif char in ("b", "B"):
            raise RegexError(f"the word boundary \\{char} is not supported", start, unsupported=True)
        elif (char.isdigit() and char != "0") or char == "k":
            raise RegexError("back-references are not supported", start, unsupported=True)
        else:
            text, _ = self._escaped(in_class=False)
            self._atom(text, start)

    def _escaped(self, *, in_class: bool) -> tuple[str, int | None]:
        """Parse an escape: its pattern, and its code point if it is one character; `_i` moves past it."""
        start, pattern = self._i, self._pattern
        char = pattern[start + 1 : start + 2]
        if not char:
            raise RegexError("the expression ends with a backslash", start)
        self._i += 2
        if char in "dDwWsS":
            return self._shorthand(char, in_class), None
        if char in "pP":
            found = _PROPERTY.match(pattern, self._i)
            if found is None:
                raise RegexError(f"\\{char} has no property such as {{L}}", start)
            self._i = found.end()
            return f"\\{char}{found[0]}", None
        if found := _HEX.match(pattern, start + 1):
            self._i = found.end()
            code = int(found[1] or found[2] or found[3], 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise RegexError("the escape is no character; write the character itself", start)
            return _literal(chr(code)), code
        if char == "c" and (letter := pattern[self._i : self._i + 1]).isascii() and letter.isalpha():
            self._i += 1
            return _literal(chr(ord(letter) % 32)), ord(letter) % 32
        if char == "b" and in_class:
            return r"\x08", 8
        if char in _CONTROL:
            return _literal(chr(_CONTROL[char])), _CONTROL[char]
        if char.isascii() and char.isalnum():
            raise RegexError(f"\\{char} is no escape that is known", start)
        return _literal(char), ord(char)

    def _shorthand(self, char: str, in_class: bool) -> str:
        if self._whole:
            return f"\\{char}"
        inside = {"d": "0-9", "w": "0-9A-Za-z_", "s": _BLANKS}[char.lower()]
        if char.isupper():
            return f"[^{inside}]"
        return inside if in_class else f"[{inside}]"

    def _char_class(self) -> str:
        """A class in brackets, with its members escaped where Rust would read more into them."""
        start, pattern = self._i, self._pattern
        self._i += 1
        negated = pattern.startswith("^", self._i)
        self._i += negated
        members: list[str] = []
        if pattern.startswith("]", self._i):
            raise RegexError(r"an empty class is not supported; write \] for the character", start)
        while True:
            if self._i >= len(pattern):
                raise RegexError("a class in brackets is not closed", start)
            if pattern[self._i] == "]":
                self._i += 1
                break
            at = self._i
            text, low = self._class_member()
            is_range = pattern.startswith("-", self._i) and not pattern.startswith("-]", self._i)
            if not is_range or low is None:
                members.append(text)
                continue
            self._i += 1
            if self._i >= len(pattern):
                raise RegexError("a class in brackets is not closed", start)
            upper, high = self._class_member()
            if high is None:  # [a-\d]: the characters a and -, and digits
                members += (text, r"\-", upper)
                continue
            if high < low:
                raise RegexError(f"the range {pattern[at : self._i]} is reversed", at)
            members.append(f"{text}-{upper}")
        return f"[{'^' if negated else ''}{''.join(members)}]"

    def _class_member(self) -> tuple[str, int | None]:
        char = self._pattern[self._i]
        if char == "\\":
            return self._escaped(in_class=True)
        if (
            self._pattern.startswith(("[:", "[.", "[="), self._i)
            and self._pattern[self._i + 1] + "]" in (self._pattern[self._i + 2 :])
        ):
            raise RegexError("named classes such as [:alpha:] are not supported; write a-zA-Z", self._i)
        self._i += 1
        return _literal(char), ord(char)


def _literal(char: str) -> str:
    """One character, escaped where it has a meaning, inside of brackets or outside."""
    if char in _SPECIAL:
        return f"\\{char}"
    return char if char.isprintable() else f"\\u{{{ord(char):x}}}"
