"""`Source`: the text of an answer as it arrives, for parsers that are written as generators.

A method that may need more text is a generator: it yields, and continues after the next `push`. A parser therefore
reads as if the whole text were there, and its result cannot depend on how the text was cut.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from typing import Final

Waits = Generator[None, None, None]

NAME: Final = re.compile(r"[A-Za-z0-9_.:\-]*")
"""Names of tools."""
_SPACE: Final = re.compile(r"\s*")

NOTHING: Final = re.compile(r"(?!)")
ANYTHING: Final = re.compile(r"")
NAMED_SIGN: Final = re.compile(r"[^\w\s]+\w")
"""A beginning of a marker that is hardly text: not `<` alone, and no word."""


class Trouble(Exception):
    """The text is no tool call, or it ended inside one."""


class Markers:
    """Finds the first of several markers in a text that is not complete yet."""

    def __init__(self, markers: Iterable[str]) -> None:
        """Prepare. No marker may be the beginning of another one."""
        self.markers = frozenset(markers)
        ordered = sorted(self.markers)
        whole = "|".join(re.escape(marker) for marker in ordered)
        begun = "|".join(_begun(marker) for marker in ordered if len(marker) > 1)
        self._pattern = re.compile(f"{whole}|{begun}" if begun else whole) if ordered else None

    def find(self, text: str, pos: int) -> tuple[int, str]:
        """The index of the first marker, or of an end of `text` that may become one, and what is there.

        Returns:
            (len(text), "") for no marker.
        """
        match = None if self._pattern is None else self._pattern.search(text, pos)
        return (len(text), "") if match is None else (match.start(), match[0])


class Source:
    """The text that has arrived and is not consumed.

    Attributes:
        text: of it, from before `pos`.
        pos: what comes next.
        final: no more text arrives.
        mark: text from here on is kept, to be read again; None: no such position.
    """

    __slots__ = ("final", "mark", "pos", "text")

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.final = False
        self.mark: int | None = None

    def push(self, text: str, final: bool) -> None:
        """More text."""
        keep = self.pos if self.mark is None else self.mark
        self.text = self.text[keep:] + text
        self.pos -= keep
        if self.mark is not None:
            self.mark = 0
        self.final = final

    def peek(self) -> Generator[None, None, str]:
        """The next character; "" at the end of the text."""
        while self.pos >= len(self.text):
            if self.final:
                return ""
            yield
        return self.text[self.pos]

    def skip_space(self) -> Waits:
        """Skip whitespace, if there is any."""
        while True:
            match = _SPACE.match(self.text, self.pos)
            assert match is not None
            self.pos = match.end()
            if self.pos < len(self.text) or self.final:
                return
            yield

    def literal(self, literal: str) -> Generator[None, None, bool]:
        """Consume `literal` if it comes next; whether it did.

        A beginning of it at the end of the text is consumed, too.
        """
        size = len(literal)
        while True:
            have = self.text[self.pos : self.pos + size]
            if have == literal:
                self.pos += size
                return True
            if not literal.startswith(have):
                return False
            if self.final:
                self.pos += len(have)
                return False
            yield

    def pieces(self, pieces: Iterable[str]) -> Generator[None, None, bool]:
        """Consume these literals with any whitespace in front of each; whether all of them came."""
        for piece in pieces:
            if piece.isspace():
                continue
            yield from self.skip_space()
            if not (yield from self.literal(piece.strip())):
                return False
        return True

    @property
    def at_end(self) -> bool:
        """All of the text has been consumed."""
        return self.final and self.pos >= len(self.text)

    def name(self, max_chars: int, pattern: re.Pattern[str] = NAME) -> Generator[None, None, str]:
        """Consume the characters that names have.

        Raises:
            Trouble: there are none, or too many.
        """
        size = 0
        while True:
            match = pattern.match(self.text, self.pos)
            assert match is not None
            size = match.end() - self.pos
            if size > max_chars:
                raise Trouble
            if match.end() < len(self.text) or self.final:
                break
            yield
        if not size:
            raise Trouble
        self.pos += size
        return self.text[self.pos - size : self.pos]

    def until(self, marker: str, max_chars: int) -> Generator[None, None, str]:
        """Consume up to and including a marker; the text before it.

        Raises:
            Trouble: it does not come, or not soon enough.
        """
        while True:
            index = self.text.find(marker, self.pos, self.pos + max_chars + len(marker))
            if index >= 0:
                break
            if len(self.text) - self.pos >= max_chars + len(marker):
                raise Trouble
            if self.final:
                self.pos = len(self.text)
                raise Trouble
            yield
        found = self.text[self.pos : index]
        self.pos = index + len(marker)
        return found

    def before(self, markers: Markers, *, dropped: re.Pattern[str] = NOTHING) -> tuple[str, str]:
        """Consume what is certainly no part of a marker, and the marker that follows; "" for none so far.

        The beginning of a marker at the end of the text is text, unless it begins with `dropped`.
        """
        index, found = markers.find(self.text, self.pos)
        is_marker = found in markers.markers
        is_end = self.final and not is_marker
        text = self.text[self.pos : len(self.text) if is_end and not dropped.match(found) else index]
        self.pos = index + len(found) if is_marker or is_end else index
        return text, found if is_marker else ""

    def rest(self) -> str:
        """Consume all that is there."""
        text = self.text[self.pos :]
        self.pos = len(self.text)
        return text


def _begun(marker: str) -> str:
    """A pattern for a proper beginning of the marker at the end of the text."""
    pattern = ""
    for char in reversed(marker[1:-1]):
        pattern = f"(?:{re.escape(char)}{pattern})?"
    return f"{re.escape(marker[0])}{pattern}\\Z"
