"""`WordWrap`: breaks lines between words while text streams to a terminal."""

from __future__ import annotations

import re
from typing import Final

from rich.cells import cell_len

_PIECES: Final = re.compile(r"\x1b\[[0-9;]*m|\n|[ \t]+|[^ \t\n\x1b]")
_TAB: Final = 8


class WordWrap:
    """Breaks lines at spaces, and before and after wide characters, which stand without spaces.

    A word is written when it is complete: its end decides the line in which it fits. A word that is longer than a line
    is left to the terminal. Escape sequences for colors have no width.
    """

    def __init__(self) -> None:
        self._column = 0
        self._spaces = ""
        self._word = ""
        self._word_width = 0
        self._in_long_word = False

    def feed(self, text: str, width: int) -> str:
        """The part of the text that can be written.

        Args:
            text: the next piece.
            width: columns of the terminal.
        """
        out: list[str] = []
        for match in _PIECES.finditer(text):
            piece = match[0]
            self._in_long_word = self._in_long_word and piece[0] not in " \t\n"
            if piece[0] == "\x1b":
                self._word += piece
            elif piece == "\n":
                out += [self._take_word(width), self._take_spaces(), "\n"]
                self._column = 0
            elif piece[0] in " \t":
                out.append(self._take_word(width))
                self._spaces += piece
            else:
                out.append(self._character(piece, width))
        return "".join(out)

    def pass_on(self, text: str) -> str:
        """Text that is not wrapped, such as code."""
        out = f"{self._take_spaces()}{self._take_word(0)}{text}"
        self._column = 0 if text.endswith("\n") else self._column + _width_of(text.rpartition("\n")[2])
        return out

    def end(self, width: int) -> str:
        """What is held back, at the end of the text."""
        out = self._take_word(width) + self._take_spaces()
        self._column = 0
        return out

    def _character(self, character: str, width: int) -> str:
        cells = cell_len(character)
        if self._in_long_word:
            self._column = (self._column + cells) % width
            return character
        before = self._take_word(width) if cells == 2 else ""
        self._word += character
        self._word_width += cells
        if cells == 2:
            return before + self._take_word(width)
        if self._word_width >= width:
            self._in_long_word = True
            return self._take_word(width)
        return before

    def _take_word(self, width: int) -> str:
        word, cells = self._word, self._word_width
        if not word:
            return ""
        self._word, self._word_width = "", 0
        spaces_width = _width_of(self._spaces)
        if width and cells and self._column and self._column + spaces_width + cells > width:
            self._spaces = ""
            self._column = cells
            return f"\n{word}"
        self._column += spaces_width + cells
        return f"{self._take_spaces()}{word}"

    def _take_spaces(self) -> str:
        spaces, self._spaces = self._spaces, ""
        return spaces


def _width_of(text: str) -> int:
    return sum(_TAB if character == "\t" else cell_len(character) for character in text)
