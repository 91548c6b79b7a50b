"""`Screen`: writes answers, notes and errors. Colors only on a terminal, and not under NO_COLOR."""

from __future__ import annotations

import os
import re
import shutil
from typing import Final, TextIO

from .answer_text.markdown import MarkdownStyler, Styled
from .answer_text.word_wrap import WordWrap

_DIM, _RED, _BOLD, _RESET = "\x1b[2m", "\x1b[31m", "\x1b[1m", "\x1b[0m"
# Everything that moves the cursor or controls the terminal; a model may generate such text.
_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Screen:
    """Two streams: answers go to `out`, notes and errors to `err`; in a conversation both are the same.

    On a terminal the lines of answers break between words, and Markdown is styled; elsewhere answers are unchanged.

    Attributes:
        styles_markdown: whether Markdown is styled where colors are possible.
    """

    def __init__(self, out: TextIO, err: TextIO, *, styles_markdown: bool = True) -> None:
        self._out, self._err = out, err
        self.styles_markdown = styles_markdown
        self._at_line_start = True
        self._markdown, self._wrap = MarkdownStyler(), WordWrap()

    @classmethod
    def for_conversation(cls, out: TextIO, *, styles_markdown: bool = True) -> Screen:
        """All on one stream, in its order."""
        return cls(out, out, styles_markdown=styles_markdown)

    def answer(self, text: str) -> None:
        """Write a piece of an answer as it arrives; on a terminal, its last word when it is complete."""
        if text:
            self._at_line_start = text.endswith("\n")
            if self._out.isatty():
                clean = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
                is_styled = self.styles_markdown and wants_color(self._out)
                text = self._wrapped(self._markdown.feed(clean) if is_styled else [Styled(clean, wraps=True)])
            self._write(self._out, text)

    def reasoning(self, text: str) -> None:
        """Write a piece of the reasoning before an answer, dimmed; not among the answers."""
        self._write(self._err, _styled(self._err, _DIM, _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)))

    def end_reasoning(self) -> None:
        """End the reasoning, so that the answer begins on a new line."""
        self._write(self._err, "\n")

    def end_answer(self) -> None:
        """End the current line, so that the next output begins on a new one."""
        if self._out.isatty():
            held = self._wrapped(self._markdown.end())
            self._write(self._out, held + self._wrap.end(_width()))
        if not self._at_line_start:
            self._write(self._out, "\n")
            self._at_line_start = True

    def line(self, text: str = "") -> None:
        """A line of normal text."""
        self._write(self._err, f"{text}\n")

    def note(self, text: str) -> None:
        """A secondary line: statistics, hints."""
        self._write(self._err, _styled(self._err, _DIM, text) + "\n")

    def heading(self, text: str) -> None:
        """A title."""
        self._write(self._err, _styled(self._err, _BOLD, text) + "\n")

    def error(self, text: str) -> None:
        """An error message."""
        self._write(self._err, _styled(self._err, _RED, text) + "\n")

    def _wrapped(self, pieces: list[Styled]) -> str:
        width = _width()
        return "".join(
            self._wrap.feed(piece.text, width) if piece.wraps else self._wrap.pass_on(piece.text)
            for piece in pieces
        )

    def _write(self, stream: TextIO, text: str) -> None:
        stream.write(text)
        stream.flush()


def _width() -> int:
    return shutil.get_terminal_size().columns


def _styled(stream: TextIO, style: str, text: str) -> str:
    return f"{style}{text}{_RESET}" if wants_color(stream) else text


def wants_color(stream: TextIO) -> bool:
    """Whether to write escape sequences to a stream; see no-color.org."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
