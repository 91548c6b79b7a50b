"""`Screen` writes answers, notes and errors; `AnswerView` shows one answer on it: reasoning, text, tool calls."""

from __future__ import annotations

import json
import os
import re
import shutil
from typing import TYPE_CHECKING, Final, TextIO

from .backend import AnswerChunk, Call

if TYPE_CHECKING:
    from rich.live import Live

_DIM, _RED, _BOLD, _RESET = "\x1b[2m", "\x1b[31m", "\x1b[1m", "\x1b[0m"
# Everything that moves the cursor or controls the terminal; a model may generate such text.
_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_FENCE: Final = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")


class Screen:
    """Two streams: answers go to `out`, notes and errors to `err`; in a conversation both are the same.

    On a terminal with colors rich shows an answer: each block of Markdown when it is complete, and below it the end of
    the block that still grows, which is replaced in place. Elsewhere answers are unchanged.

    Attributes:
        styles_markdown: whether Markdown is styled; without, rich only breaks lines between words.
    """

    def __init__(self, out: TextIO, err: TextIO, *, styles_markdown: bool = True) -> None:
        self._out, self._err = out, err
        self.styles_markdown = styles_markdown
        self._at_line_start = True
        self._live: Live | None = None
        self._growing = ""
        self._has_blocks = False

    @classmethod
    def for_conversation(cls, out: TextIO, *, styles_markdown: bool = True) -> Screen:
        """All on one stream, in its order."""
        return cls(out, out, styles_markdown=styles_markdown)

    def answer(self, text: str) -> None:
        """Write a piece of an answer as it arrives."""
        if not text:
            return
        if self._out.isatty():
            text = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
        if not wants_color(self._out):
            self._at_line_start = text.endswith("\n")
            self._write(self._out, text)
            return
        self._growing += text
        end = end_of_blocks(self._growing) if self.styles_markdown else self._growing.rfind("\n") + 1
        blocks, self._growing = self._growing[:end], self._growing[end:]
        self._show(blocks)

    def reasoning(self, text: str) -> None:
        """Write a piece of the reasoning before an answer, dimmed; not among the answers."""
        self._write(self._err, _styled(self._err, _DIM, _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)))

    def end_reasoning(self) -> None:
        """End the reasoning, so that the answer begins on a new line."""
        self._write(self._err, "\n")

    def end_answer(self) -> None:
        """End the current line, so that the next output begins on a new one."""
        if self._live is not None:
            blocks, self._growing = self._growing, ""
            self._show(blocks)
            self._live.stop()
            self._live, self._has_blocks = None, False
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

    def _show(self, blocks: str) -> None:
        """Print complete blocks above the live region, which gets the end of the growing one: it must fit."""
        from rich.markdown import Markdown
        from rich.text import Text

        live = self._live or self._start()
        console = live.console
        growing = Text(self._growing).wrap(console, console.width)[-max(1, console.height - 2) :]
        with console:  # all of it in one write: nothing flickers
            live.update(Text("\n").join(growing), refresh=True)
            if blocks.strip() and self.styles_markdown:
                if self._has_blocks:
                    console.print()
                console.print(Markdown(blocks, hyperlinks=False))
                self._has_blocks = True
            elif blocks and not self.styles_markdown:
                console.print(Text(blocks.removesuffix("\n")))

    def _start(self) -> Live:
        from rich.console import Console
        from rich.live import Live

        columns, rows = shutil.get_terminal_size()
        console = Console(file=self._out, force_terminal=True, width=columns, height=rows, highlight=False)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()
        return self._live

    def _write(self, stream: TextIO, text: str) -> None:
        stream.write(text)
        stream.flush()


def end_of_blocks(text: str) -> int:
    """End of the last complete block of Markdown: at a closing fence, or before a line that begins a new block.

    After a blank line an indented line still belongs to the block, as in a list.
    """
    fence, is_blank, start, end = "", False, 0, 0
    for line in text.splitlines(keepends=True):
        mark = _FENCE.match(line)
        if is_blank and not fence and not line[0].isspace():
            end = start
        start += len(line)
        if not line.endswith("\n"):
            break
        is_blank = not line.strip()
        if fence:
            if mark and mark[1].startswith(fence) and not mark[2].strip():
                fence, end = "", start
        elif mark:
            fence = mark[1]
    return end


def _styled(stream: TextIO, style: str, text: str) -> str:
    return f"{style}{text}{_RESET}" if wants_color(stream) else text


def wants_color(stream: TextIO) -> bool:
    """Whether to write escape sequences to a stream; see no-color.org."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class AnswerView:
    """One answer on the screen.

    Attributes:
        parts: the text so far.
        calls: the tool calls so far, in order; arguments grow with each chunk.
    """

    def __init__(self, screen: Screen, *, shows_text: bool = True) -> None:
        """With `shows_text` False nothing is written: the caller prints the answer at its end."""
        self._screen = screen
        self._shows_text = shows_text
        self._reasoning = False
        self.parts: list[str] = []
        self.calls: list[Call] = []

    @property
    def text(self) -> str:
        """The text of the answer so far."""
        return "".join(self.parts)

    @property
    def is_empty(self) -> bool:
        """Whether neither text nor calls have arrived."""
        return not self.parts and not self.calls

    def add(self, chunk: AnswerChunk) -> bool:
        """Show what is new in a chunk; returns whether there was anything."""
        if chunk.reasoning and self._shows_text:
            self._screen.reasoning(chunk.reasoning)
            self._reasoning = True
        if chunk.text:
            self._end_reasoning()
            self.parts.append(chunk.text)
            if self._shows_text:
                self._screen.answer(chunk.text)
        for piece in chunk.calls:
            if piece.number >= len(self.calls):
                self.calls.append(piece)
            else:
                known = self.calls[piece.number]
                self.calls[piece.number] = known._replace(
                    name=known.name + piece.name, arguments=known.arguments + piece.arguments
                )
        return bool(chunk.text or chunk.reasoning or chunk.calls)

    def end(self) -> None:
        """The answer is complete: end its line, and write its calls, one JSON object per line."""
        self._end_reasoning()
        self._screen.end_answer()
        if self._shows_text:
            for call in self.calls:
                self._screen.answer(f"{call_line(call)}\n")

    def stored_text(self) -> str:
        """The answer as a conversation keeps it: its text and its calls."""
        lines = [self.text] if self.text else []
        return "\n".join([*lines, *map(call_line, self.calls)])

    def _end_reasoning(self) -> None:
        if self._reasoning:
            self._reasoning = False
            self._screen.end_reasoning()


def call_line(call: Call) -> str:
    """A call as JSON, with its arguments as an object if they are one."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:  # the answer was cut
        arguments = call.arguments
    return json.dumps({"name": call.name, "arguments": arguments}, ensure_ascii=False)
