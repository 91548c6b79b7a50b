"""`read_texts`: the texts of a command: the lines of files or of standard input."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...runtime.errors import ConfigError, RequestError
from ...runtime.text import counted, decode_utf8

STANDARD_INPUT: Final = "-"
_INPUT: Final = re.compile(r"(?:the )?(?:input|documents|document|pair)(?:\[(\d+)\]| (\d+))?(?=[ :])")
"""Beginnings of the engine's and servers' errors about one text."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts, and where each one comes from.

    Attributes:
        places: `line 17 of notes.txt`, of each text.
        numbers: of its line in its file, counted from 1.
        num_skipped: empty ones that were left out.
    """

    texts: list[str]
    places: list[str]
    numbers: list[int]
    num_skipped: int = 0

    def located(self, error: RequestError, start: int) -> RequestError:
        """An error about one of the texts from `start` on, with its place instead of its number."""
        message = str(error)
        if (match := _INPUT.match(message)) is None:
            return error
        index = start + int(match[1] or match[2] or 0)
        if index >= len(self.places):
            return error
        message = self.places[index] + message[match.end() :]
        return RequestError(message, param=error.param, code=error.code, status=error.status)


def read_texts(files: Sequence[str], *, null: bool, skip_empty: bool) -> Texts:
    """The lines of the files in their order; of standard input, if there is none. Empty lines at an end are left out.

    Args:
        files: paths; `-` is standard input.
        null: texts end with a NUL byte instead of a line end, and may have several lines.
        skip_empty: leave out empty texts; otherwise they are errors.

    Raises:
        ConfigError: a file cannot be read, or is not UTF-8.
        RequestError: a text is empty, or there is none.
    """
    texts: list[str] = []
    places: list[str] = []
    numbers: list[int] = []
    num_skipped = 0
    for file in files or (STANDARD_INPUT,):
        name = "standard input" if file == STANDARD_INPUT else file
        parts = _parts(decode_utf8(_bytes_of(file), name), null=null)
        for number, part in enumerate(parts, 1):
            place = f"{'text' if null else 'line'} {number} of {name}"
            if part.strip():
                texts.append(part)
                places.append(place)
                numbers.append(number)
            elif skip_empty:
                num_skipped += 1
            else:
                raise RequestError(
                    f"{place} is empty, and an empty text has no meaning; remove it, or pass --skip-empty"
                )
    if not texts:
        what = " and ".join("standard input" if file == STANDARD_INPUT else file for file in files)
        raise RequestError(f"there is no text: {what or 'standard input'} is empty")
    return Texts(texts, places, numbers, num_skipped)


def skipped_note(texts: Texts) -> str:
    """A line about the texts that were left out; "" if there are none."""
    return f"{counted(texts.num_skipped, 'empty text')} left out" if texts.num_skipped else ""


def _parts(text: str, *, null: bool) -> list[str]:
    """The texts of a file, without empty ones at its end."""
    # Not `splitlines`, which also splits at characters that occur within lines, such as U+2028 and form feeds.
    parts = text.split("\0") if null else text.replace("\r\n", "\n").split("\n")
    while parts and not parts[-1].strip():
        parts.pop()
    return parts


def _bytes_of(file: str) -> bytes:
    if file == STANDARD_INPUT:
        if sys.stdin is None or sys.stdin.closed:
            raise ConfigError("standard input is closed; name a file")
        if sys.stdin.isatty():
            print("One text per line; Ctrl-D ends the input.", file=sys.stderr)
        return sys.stdin.buffer.read()
    try:
        with open(file, "rb") as opened:
            return opened.read()
    except PermissionError:
        raise
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
