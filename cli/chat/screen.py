"""`Screen`: writes answers, notes and errors. Colors only on a terminal, and not under NO_COLOR."""

from __future__ import annotations

import os
import re
from typing import Final, TextIO

_DIM, _RED, _BOLD, _RESET = "\x1b[2m", "\x1b[31m", "\x1b[1m", "\x1b[0m"
# Everything that moves the cursor or controls the terminal; a model may generate such text.
_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Screen:
    """Two streams: answers go to `out`, notes and errors to `err`; in a conversation both are the same."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out, self._err = out, err
        self._at_line_start = True

    @classmethod
    def for_conversation(cls, out: TextIO) -> Screen:
        """All on one stream, in its order."""
        return cls(out, out)

    def answer(self, text: str) -> None:
        """Write a piece of an answer as it arrives."""
        if text:
            shown = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text) if self._out.isatty() else text
            self._write(self._out, shown)
            self._at_line_start = text.endswith("\n")

    def reasoning(self, text: str) -> None:
        """Write a piece of the reasoning before an answer, dimmed; not among the answers."""
        self._write(self._err, _styled(self._err, _DIM, _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)))

    def end_reasoning(self) -> None:
        """End the reasoning, so that the answer begins on a new line."""
        self._write(self._err, "\n")

    def end_answer(self) -> None:
        """End the current line, so that the next output begins on a new one."""
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

    def _write(self, stream: TextIO, text: str) -> None:
        stream.write(text)
        stream.flush()


def _styled(stream: TextIO, style: str, text: str) -> str:
    return f"{style}{text}{_RESET}" if wants_color(stream) else text


def wants_color(stream: TextIO) -> bool:
    """Whether to write escape sequences to a stream; see no-color.org."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
