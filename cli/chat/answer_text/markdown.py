"""`MarkdownStyler`: styles the Markdown of an answer while it streams."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_BOLD, _ITALIC, _CYAN, _DIM, _RESET = "\x1b[1m", "\x1b[3m", "\x1b[36m", "\x1b[2m", "\x1b[0m"
_MAX_HELD: Final = 400
"""Characters of a span that are held back until its closing mark arrives; after them the marks are text."""
_LINE_HEAD: Final = re.compile(r" {0,3}(?:(?P<heading>#{1,6} +)|(?P<fence>`{3,}|~{3,}))")
_LINE_HEAD_BEGINS: Final = re.compile(r" {0,3}(?:#{0,6} *|`{0,3}|~{0,3})$")
_MARK: Final = re.compile(r"`+|\*+")
_SPANS: Final = (
    (re.compile(r"(?P<mark>`+)(?P<text>[^`\n]+)(?P=mark)(?!`)"), _CYAN),
    (re.compile(r"\*\*(?=[^\s*])(?P<text>[^*\n]*[^\s*])\*\*(?!\*)"), _BOLD),
    (re.compile(r"\*(?=[^\s*])(?P<text>[^*\n]*[^\s*])\*(?!\*)"), _ITALIC),
)


class Styled(NamedTuple):
    """A piece of styled text; `wraps`: lines may be broken at spaces, which they may not in code."""

    text: str
    wraps: bool


class MarkdownStyler:
    """Turns headings, bold and italic spans, inline code and fenced code into escape sequences.

    The marks of a span are removed only if its closing mark is in the same line; all other text is passed on unchanged.
    Text with a mark that may still be closed is held back, at most to the end of its line.
    """

    def __init__(self) -> None:
        self._held = ""
        self._at_line_start = True
        self._in_heading = False
        self._fence = ""  # its opening mark, while inside
        self._previous = "\n"  # the last character that was passed on

    def feed(self, piece: str) -> list[Styled]:
        """Style the next piece of the answer."""
        self._held += piece
        return self._take(is_end=False)

    def end(self) -> list[Styled]:
        """Return what is held back, at the end of the answer."""
        styled = self._take(is_end=True)
        if self._in_heading or self._fence:
            styled.append(Styled(_RESET, True))
        self.__init__()  # type: ignore[misc]  # the next answer begins anew
        return styled

    def _take(self, *, is_end: bool) -> list[Styled]:
        styled: list[Styled] = []
        while self._held:
            part = self._next(is_end=is_end)
            if part is None:
                break
            styled.append(part)
        return styled

    def _next(self, *, is_end: bool) -> Styled | None:
        if self._at_line_start:
            if not is_end and _LINE_HEAD_BEGINS.match(self._held):
                return None
            self._at_line_start = False
            head = _LINE_HEAD.match(self._held)
            if head is not None and (head["fence"] or not self._fence):
                return self._line_head(head, is_end=is_end)
        if self._fence:
            return self._until_line_end(len(self._held), wraps=False)
        mark = _MARK.search(self._held)
        if mark is None or mark.start() > 0:
            return self._until_line_end(len(self._held) if mark is None else mark.start())
        return self._span(mark, is_end=is_end)

    def _line_head(self, head: re.Match[str], *, is_end: bool) -> Styled | None:
        if head["heading"]:
            self._held = self._held[head.end() :]
            self._in_heading = True
            return Styled(_BOLD, True)
        line, newline, rest = self._held.partition("\n")
        if not newline and not is_end:
            self._at_line_start = True
            return None  # the fence's line may have a language, or be no closing fence
        if self._fence:
            if not line.strip().startswith(self._fence) or line.strip().strip(self._fence[0]):
                return self._until_line_end(len(self._held), wraps=False)
            self._fence = ""
            styled = f"{_RESET}{_DIM}{line}{_RESET}{newline}"
        else:
            self._fence = head["fence"]
            styled = f"{_DIM}{line}{_RESET}{newline}{_CYAN}"
        self._held, self._at_line_start, self._previous = rest, True, "\n"
        return Styled(styled, False)

    def _until_line_end(self, limit: int, *, wraps: bool = True) -> Styled:
        """Pass text on to the end of the line, `limit` characters at most."""
        line_end = self._held.find("\n", 0, limit)
        size = limit if line_end < 0 else line_end + 1
        text, self._held = self._held[:size], self._held[size:]
        self._previous = text[-1]
        self._at_line_start = line_end >= 0
        if self._at_line_start and self._in_heading:
            self._in_heading = False
            text = f"{text[:-1]}{_RESET}\n"
        return Styled(text, wraps)

    def _span(self, mark: re.Match[str], *, is_end: bool) -> Styled | None:
        """A span that begins at the mark in front of the held text, or the mark as text."""
        if mark[0][0] == "`" or not self._previous.isalnum():
            for pattern, style in _SPANS:
                span = pattern.match(self._held)
                if span is not None and (is_end or span.end() < len(self._held)):
                    self._held, self._previous = self._held[span.end() :], span["text"][-1]
                    return Styled(f"{style}{span['text']}{_RESET}{_BOLD if self._in_heading else ''}", True)
            if not is_end and "\n" not in self._held and len(self._held) < _MAX_HELD:
                return None
        elif mark.end() == len(self._held) and not is_end:
            return None
        return self._until_line_end(mark.end())
