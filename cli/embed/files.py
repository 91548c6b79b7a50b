"""Texts in and vectors out: the lines of files or of standard input; .npy, JSON lines, CSV, a table for a terminal."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Final, Literal

import numpy as np
import numpy.typing as npt

from ...runtime.errors import ConfigError, RequestError
from ...runtime.text import counted, decode_utf8
from ..console import framed_table, output_console

Vectors = npt.NDArray[np.float32]
FormatName = Literal["npy", "jsonl", "csv", "table"]
Rows = Iterable[tuple[Sequence[str], Vectors]]
"""Texts and their vectors, float32 [n, D], some at a time."""

STANDARD_INPUT: Final = "-"
_INPUT: Final = re.compile(r"(?:the )?(?:input|documents|document|pair)(?:\[(\d+)\]| (\d+))?(?=[ :])")
"""Beginnings of the engine's and servers' errors about one text."""
_ROWS_SHOWN: Final = 20
_NUMBERS_SHOWN: Final = 4
_TEXT_COLUMNS: Final = 40
_MATRIX_ROWS: Final = 8
"""Most texts with a similarity matrix: as many columns as fit 80 characters."""


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

    def located(self, error: RequestError, message: str, start: int) -> RequestError:
        """An error with another message; if it is about a text, counted from `start`, with its place."""
        match = _INPUT.match(message)
        index = start + int(match[1] or match[2] or 0) if match else 0
        if match and index < len(self.places):
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


def _write_npy(out: BinaryIO, num_texts: int, rows: Rows) -> None:
    """NumPy's format, float32 [num_texts, D]: `numpy.load` reads it, from a pipe, too."""
    for number, (_texts, vectors) in enumerate(rows):
        if number == 0:
            header = io.BytesIO()
            shape = (num_texts, vectors.shape[1])
            np.lib.format.write_array_header_1_0(
                header, {"descr": "<f4", "fortran_order": False, "shape": shape}
            )
            out.write(header.getvalue())
        out.write(np.ascontiguousarray(vectors, dtype="<f4").tobytes())
    out.flush()


def _write_json_lines(out: BinaryIO, num_texts: int, rows: Rows) -> None:
    """An object with `text` and `embedding` on each line."""
    for texts, vectors in rows:
        for text, vector in zip(texts, vectors, strict=True):
            numbers = ", ".join(map(str, vector))
            line = f'{{"text": {json.dumps(text, ensure_ascii=False)}, "embedding": [{numbers}]}}\n'
            out.write(line.encode())
    out.flush()


def _write_csv(out: BinaryIO, num_texts: int, rows: Rows) -> None:
    """The numbers of each vector on a line, separated by commas."""
    for _texts, vectors in rows:
        out.writelines((",".join(map(str, vector)) + "\n").encode() for vector in vectors)
    out.flush()


def _print_table(_out: BinaryIO, num_texts: int, rows: Rows) -> None:
    """The beginning of each vector, and for a few texts how similar they are; on standard output."""
    texts: list[str] = []
    vectors: list[Vectors] = []
    for part, more in rows:
        room = max(_ROWS_SHOWN - len(texts), 0)
        texts += part[:room]
        vectors += list(more[:room])
    console = output_console()
    size = len(vectors[0])
    console.print(f"{counted(num_texts, 'vector')} of {counted(size, 'number')}")
    table = framed_table(console)
    table.add_column("", justify="right")
    table.add_column("text", max_width=_TEXT_COLUMNS, no_wrap=True)
    table.add_column("length", justify="right")
    table.add_column("numbers", no_wrap=True)
    for n, (text, vector) in enumerate(zip(texts, vectors, strict=True), 1):
        numbers = ", ".join(f"{number:.3f}" for number in vector[:_NUMBERS_SHOWN])
        ending = ", …" if size > _NUMBERS_SHOWN else ""
        table.add_row(str(n), _plain(text), f"{float(np.linalg.norm(vector)):.2f}", f"{numbers}{ending}")
    console.print(table)
    if num_texts > len(texts):
        console.print(f"and {num_texts - len(texts)} more; -o vectors.npy writes all of them")
    if 2 <= num_texts <= _MATRIX_ROWS:
        matrix = np.stack(vectors)
        matrix = matrix / np.maximum(np.linalg.norm(matrix, axis=1, keepdims=True), 1e-12)
        console.print("similarity (cosine: 1 for the same direction)")
        table = framed_table(console)
        for column in ("", *range(1, num_texts + 1)):
            table.add_column(str(column), justify="right")
        for n, row in enumerate(matrix @ matrix.T, 1):
            table.add_row(str(n), *(f"{value:.2f}" for value in row))
        console.print(table)


WRITERS: Final[dict[FormatName, Callable[[BinaryIO, int, Rows], None]]] = {
    "npy": _write_npy,
    "jsonl": _write_json_lines,
    "csv": _write_csv,
    "table": _print_table,
}
"""Form of the vectors -> writes as many rows; numbers are the shortest decimals that read as the same float32."""


def _plain(text: str) -> str:
    """A text for one row: no control characters, and nothing that rich takes for markup."""
    from rich.markup import escape

    flat = "".join(char if char.isprintable() else " " for char in text)
    return escape(flat if len(flat) <= _TEXT_COLUMNS else flat[: _TEXT_COLUMNS - 1] + "…")
