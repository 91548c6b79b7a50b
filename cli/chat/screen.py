"""`Screen` writes answers, reasoning, notes and errors: all of it wrapped at words on a terminal."""

from __future__ import annotations

import os
import re
import shutil
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

_DIM, _RED, _BOLD, _RESET = "\x1b[2m", "\x1b[31m", "\x1b[1m", "\x1b[0m"
# Everything that moves the cursor or controls the terminal; a model may generate such text.
_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_FENCE: Final = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")


class Screen:
    """Two streams: answers go to `out`, notes and errors to `err`; without `err`, as in a conversation, to `out` too.

    On a terminal rich shows an answer: each block of Markdown when it is complete, and below it the end of the block
    that still grows, which is replaced in place. Elsewhere answers are unchanged.

    Attributes:
        styles_markdown: whether Markdown is styled; without, rich only breaks lines between words.
    """

    def __init__(self, out: TextIO, err: TextIO | None = None, *, styles_markdown: bool = True) -> None:
        self._out, self._err = out, out if err is None else err
        self.styles_markdown = styles_markdown
        self._at_line_start = True
        self._is_reasoning = False
        self._live: Live | None = None
        self._growing = ""
        self._has_blocks = False

    def answer(self, text: str) -> None:
        """Write a piece of an answer as it arrives."""
        if not text:
            return
        self._end_reasoning()
        if not _moves_cursor(self._out):
            self._at_line_start = text.endswith("\n")
            self._write(self._out, _visible(text) if self._out.isatty() else text)
            return
        self._growing += _visible(text)
        end = end_of_blocks(self._growing) if self.styles_markdown else self._growing.rfind("\n") + 1
        blocks, self._growing = self._growing[:end], self._growing[end:]
        self._show(self._out, blocks, is_markdown=self.styles_markdown)

    def reasoning(self, text: str) -> None:
        """Write a piece of the reasoning before an answer, dimmed; not among the answers."""
        if not text:
            return
        self._is_reasoning = True
        if not _moves_cursor(self._err):
            self._write(self._err, _styled(self._err, _DIM, _visible(text)))
            return
        lines, newline, self._growing = (self._growing + _visible(text)).rpartition("\n")
        self._show(self._err, lines + newline, style="dim")

    def end_answer(self) -> None:
        """End the current line, so that the next output begins on a new one."""
        self._end_reasoning()
        if self._live is not None:
            self._end_live(self._out, is_markdown=self.styles_markdown)
        if not self._at_line_start:
            self._write(self._out, "\n")
            self._at_line_start = True

    def line(self, text: str = "") -> None:
        self._write_line("", text)

    def note(self, text: str) -> None:
        """A secondary line: statistics, hints."""
        self._write_line(_DIM, text)

    def heading(self, text: str) -> None:
        self._write_line(_BOLD, text)

    def error(self, text: str) -> None:
        self._write_line(_RED, text)

    def _end_reasoning(self) -> None:
        if not self._is_reasoning:
            return
        self._is_reasoning = False
        if self._live is None:
            self._write(self._err, "\n")
        else:
            self._end_live(self._err, is_markdown=False, style="dim")

    def _write_line(self, style: str, text: str) -> None:
        if self._err.isatty():
            from rich.text import Text

            console = _console_of(self._err)
            text = "\n".join(line.plain.rstrip() for line in Text(text).wrap(console, console.width))
        self._write(self._err, (_styled(self._err, style, text) if style else text) + "\n")

    def _show(self, stream: TextIO, blocks: str, *, is_markdown: bool = False, style: str = "") -> None:
        """Print complete blocks above the live region, which gets the end of the growing one: it must fit."""
        from rich.markdown import Markdown
        from rich.text import Text

        live = self._live = self._live or _start_live(stream)
        console = live.console
        growing = Text(self._growing, style).wrap(console, console.width)[-max(1, console.height - 2) :]
        with console:  # all of it in one write: nothing flickers
            live.update(Text("\n").join(growing), refresh=True)
            if blocks.strip() and is_markdown:
                if self._has_blocks:
                    console.print()
                console.print(Markdown(blocks, hyperlinks=False))
                self._has_blocks = True
            elif blocks and not is_markdown:
                console.print(Text(blocks.removesuffix("\n"), style))

    def _end_live(self, stream: TextIO, *, is_markdown: bool, style: str = "") -> None:
        assert self._live is not None
        blocks, self._growing = self._growing, ""
        self._show(stream, blocks, is_markdown=is_markdown, style=style)
        self._live.stop()
        self._live, self._has_blocks = None, False

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


def wants_color(stream: TextIO) -> bool:
    """Whether to write colors to a stream; see no-color.org."""
    return _moves_cursor(stream) and not os.environ.get("NO_COLOR")


def _moves_cursor(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _styled(stream: TextIO, style: str, text: str) -> str:
    return f"{style}{text}{_RESET}" if wants_color(stream) else text


def _visible(text: str) -> str:
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def _console_of(stream: TextIO) -> Console:
    from rich.console import Console

    columns, rows = shutil.get_terminal_size()
    return Console(file=stream, force_terminal=True, width=columns, height=rows, highlight=False)


def _start_live(stream: TextIO) -> Live:
    from rich.live import Live

    live = Live(console=_console_of(stream), auto_refresh=False, transient=True)
    live.start()
    return live
