"""`LinearRegex`: finds where a match of a regular expression ends, in text that arrives in pieces, in linear time.

A client chooses the expression, so it must not slow down others: Python's `re` may take exponential time, and a state
machine takes for each character at most as many operations as the expression has states (R. Cox, "Regular Expression
Matching Can Be Simple And Fast"). What needs more than one pass over the text is refused: look-around, back references,
`$` and word boundaries, atomic groups.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

MAX_STATES: Final = 256
"""The most states of all expressions of a request: 0.1 ms for a character in the worst case."""
_MAX_KNOWN: Final = 4096
"""Transitions that are kept; an expression over a large alphabet would fill the memory otherwise."""
_KNOWN_CHARS: Final = 64
"""Characters that a set keeps its answer for, so that its length counts once for a character, not for each state."""
_parser: Final[Any] = importlib.import_module("re._parser")

IsChar = Callable[[str], bool]


class UnsupportedRegexError(ValueError):
    """The expression is invalid, too large, or has no linear form; the message says which."""


class _Machine:
    """The states of one expression: each reads a character or goes on without one.

    Attributes:
        reads: of each state the characters that it takes, or None.
        following: of each state the states after it.
        at_start: states that are passed at the beginning of the text only.
    """

    def __init__(self) -> None:
        self.reads: list[IsChar | None] = []
        self.following: list[list[int]] = []
        self.at_start: set[int] = set()
        # By identity: the states of a repeated item share its test. The syntax tree lives as long as states are added.
        self._tests: dict[tuple[str, int, int], IsChar] = {}

    def state(self, reads: IsChar | None = None, following: Sequence[int] = ()) -> int:
        if len(self.reads) >= MAX_STATES:
            raise UnsupportedRegexError(
                f"has more than {MAX_STATES} states; make it or its repetitions shorter"
            )
        self.reads.append(reads)
        self.following.append(list(following))
        return len(self.reads) - 1

    def sequence(self, items: Any, flags: int, end: int) -> int:
        """The state that begins these items, after which `end` follows."""
        for item in reversed(list(items)):
            op, value = item
            end = self.item(op, value, flags, end)
        return end

    def item(self, op: Any, value: Any, flags: int, end: int) -> int:
        name = str(op)
        if name in ("LITERAL", "NOT_LITERAL", "IN", "ANY"):
            key = (name, value if isinstance(value, int) else id(value), flags)
            if key not in self._tests:
                self._tests[key] = _is_char(name, value, flags)
            return self.state(self._tests[key], [end])
        if name == "SUBPATTERN":
            _, added, removed, inner = value
            return self.sequence(inner, (flags | added) & ~removed, end)
        if name == "BRANCH":
            return self.state(None, [self.sequence(branch, flags, end) for branch in value[1]])
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, inner = value
            if most == _parser.MAXREPEAT:
                loop = self.state(None, [end])
                self.following[loop].append(self.sequence(inner, flags, loop))
                end = loop
            else:
                last = end
                for _ in range(most - least):
                    end = self.state(None, [self.sequence(inner, flags, end), last])
            for _ in range(least):
                begin = self.sequence(inner, flags, end)
                if begin == end:  # nothing is repeated, however often
                    break
                end = begin
            return end
        if name == "AT" and str(value) == "AT_BEGINNING" and flags & re.MULTILINE:
            raise UnsupportedRegexError("has the flag m, with which ^ needs the character before")
        if name == "AT" and str(value) in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            start = self.state(None, [end])
            self.at_start.add(start)
            return start
        raise UnsupportedRegexError(
            f"has {_NAMES.get(name, name.lower())}, but the text is read once, from its beginning; leave it out"
        )


_NAMES: Final = {
    "ASSERT": "look-around",
    "ASSERT_NOT": "look-around",
    "GROUPREF": "back references",
    "GROUPREF_IGNORE": "back references",
    "GROUPREF_EXISTS": "conditions",
    "AT": "$ or word boundaries",
    "ATOMIC_GROUP": "atomic groups",
    "POSSESSIVE_REPEAT": "possessive repetitions",
}
_CATEGORIES: Final = {
    "CATEGORY_DIGIT": r"\d",
    "CATEGORY_NOT_DIGIT": r"\D",
    "CATEGORY_SPACE": r"\s",
    "CATEGORY_NOT_SPACE": r"\S",
    "CATEGORY_WORD": r"\w",
    "CATEGORY_NOT_WORD": r"\W",
}


def _is_char(name: str, value: Any, flags: int) -> IsChar:
    """Whether a character is one of an item's."""
    if name == "ANY":
        return (lambda char: True) if flags & re.DOTALL else (lambda char: char != "\n")
    if name != "IN":
        wanted, negated = chr(value), name == "NOT_LITERAL"
        if not flags & re.IGNORECASE:
            return lambda char: (char == wanted) != negated
        value = [(_parser.LITERAL, value)]
    else:
        negated = str(value[0][0]) == "NEGATE"
    by_op: dict[str, list[Any]] = {}
    for op, each in value:
        by_op.setdefault(str(op), []).append(each)
    literals = frozenset(map(chr, by_op.get("LITERAL", ())))
    ranges = [(chr(low), chr(high)) for low, high in by_op.get("RANGE", ())]
    names = dict.fromkeys(_CATEGORIES[str(each)] for each in by_op.get("CATEGORY", ()))
    category = re.compile("|".join(names), flags & re.ASCII) if names else None

    def found(char: str) -> bool:
        return (
            char in literals
            or any(low <= char <= high for low, high in ranges)
            or (category is not None and category.match(char) is not None)
        )

    @functools.lru_cache(_KNOWN_CHARS)
    def is_char(char: str) -> bool:
        cases = (char, char.lower(), char.upper()) if flags & re.IGNORECASE else (char,)
        return any(map(found, cases)) != negated

    return is_char


class LinearRegex:
    """One expression, and the state of one text."""

    __slots__ = ("_accepts", "_current", "_known", "_machine", "_start", "num_states", "pattern")

    def __init__(self, pattern: str) -> None:
        """Parse an expression in Python's syntax.

        Raises:
            UnsupportedRegexError: see there.
        """
        self.pattern = pattern
        try:
            parsed = _parser.parse(pattern)
        except (
            re.error,
            ValueError,
            OverflowError,
            RecursionError,
        ) as error:  # ValueError: flags that disagree
            raise UnsupportedRegexError(f"is no regular expression: {error}") from None
        self._machine = machine = _Machine()
        self._accepts = machine.state()
        try:
            self._start = machine.sequence(parsed, parsed.state.flags, self._accepts)
        except RecursionError:
            raise UnsupportedRegexError("is nested too deeply") from None
        self.num_states = len(machine.reads)
        self._known: dict[tuple[frozenset[int], str], frozenset[int]] = {}
        self._current = self._closed([self._start], at_start=True)
        if self._accepts in self._current:
            raise UnsupportedRegexError("matches the empty text, so it matches everywhere")

    def push(self, text: str) -> int | None:
        """Read the next piece; returns the characters of it up to the end of the first match, None without any."""
        for n, char in enumerate(text, 1):
            known = self._known.get((self._current, char))
            if known is None:
                reads, following = self._machine.reads, self._machine.following
                after = [self._start]
                for state in self._current:
                    is_char = reads[state]
                    if is_char is not None and is_char(char):
                        after += following[state]
                if len(self._known) >= _MAX_KNOWN:
                    self._known.clear()
                known = self._known[self._current, char] = self._closed(after, at_start=False)
            self._current = known
            if self._accepts in known:
                return n
        return None

    def _closed(self, states: list[int], *, at_start: bool) -> frozenset[int]:
        """The states that are reached without reading a character."""
        found: set[int] = set()
        while states:
            state = states.pop()
            if state in found or (state in self._machine.at_start and not at_start):
                continue
            found.add(state)
            if self._machine.reads[state] is None:
                states += self._machine.following[state]
        return frozenset(found)


def checked_patterns(patterns: Sequence[str]) -> list[LinearRegex]:
    """The expressions of one request.

    Raises:
        UnsupportedRegexError: one is not supported, or together they have too many states.
    """
    made = [LinearRegex(pattern) for pattern in patterns]
    if (total := sum(each.num_states for each in made)) > MAX_STATES:
        raise UnsupportedRegexError(f"has {total} states together, more than {MAX_STATES}; make it shorter")
    return made
