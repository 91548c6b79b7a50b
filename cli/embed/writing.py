"""The forms in which `engine embed` writes vectors: .npy, JSON lines, CSV, and a table for a terminal."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import BinaryIO, Final, Literal, Protocol

import numpy as np

from ...runtime.text import counted
from ..console import framed_table, output_console
from .backend import Vectors

FormatName = Literal["npy", "jsonl", "csv", "table"]
FORMATS: Final[tuple[FormatName, ...]] = ("npy", "jsonl", "csv", "table")

_ROWS_SHOWN: Final = 20
_NUMBERS_SHOWN: Final = 4
_TEXT_COLUMNS: Final = 40
_MATRIX_ROWS: Final = 8
"""Most texts whose similarity matrix is printed: as many columns as fit 80 characters."""


class VectorWriter(Protocol):
    """Writes vectors as they come."""

    def write(self, texts: Sequence[str], vectors: Vectors) -> None:
        """Write the next texts' vectors, float32 [n, D]."""
        ...

    def end(self) -> None:
        """Write what remains."""
        ...


class NpyWriter:
    """NumPy's format, float32 [num_texts, D]: `numpy.load` reads it, from a pipe, too."""

    def __init__(self, out: BinaryIO, num_texts: int) -> None:
        self._out = out
        self._num_texts = num_texts
        self._began = False

    def write(self, texts: Sequence[str], vectors: Vectors) -> None:
        if not self._began:
            self._began = True
            header = io.BytesIO()
            shape = (self._num_texts, vectors.shape[1])
            np.lib.format.write_array_header_1_0(
                header, {"descr": "<f4", "fortran_order": False, "shape": shape}
            )
            self._out.write(header.getvalue())
        self._out.write(np.ascontiguousarray(vectors, dtype="<f4").tobytes())

    def end(self) -> None:
        self._out.flush()


class JsonLinesWriter:
    """An object with `text` and `embedding` on each line."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def write(self, texts: Sequence[str], vectors: Vectors) -> None:
        for text, vector in zip(texts, vectors, strict=True):
            numbers = ", ".join(map(_number, vector))
            line = f'{{"text": {json.dumps(text, ensure_ascii=False)}, "embedding": [{numbers}]}}\n'
            self._out.write(line.encode())

    def end(self) -> None:
        self._out.flush()


class CsvWriter:
    """The numbers of each vector on a line, separated by commas."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def write(self, texts: Sequence[str], vectors: Vectors) -> None:
        for vector in vectors:
            self._out.write((",".join(map(_number, vector)) + "\n").encode())

    def end(self) -> None:
        self._out.flush()


class TableWriter:
    """The beginning of each vector, and for a few texts how similar they are."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._rows: list[Vectors] = []
        self._total = 0

    def write(self, texts: Sequence[str], vectors: Vectors) -> None:
        room = _ROWS_SHOWN - len(self._texts)
        self._texts += texts[:room]
        self._rows += list(vectors[: max(room, 0)])
        self._total += len(texts)

    def end(self) -> None:
        console = output_console()
        size = len(self._rows[0])
        console.print(f"{counted(self._total, 'vector')} of {counted(size, 'number')}")
        table = framed_table(console)
        table.add_column("", justify="right")
        table.add_column("text", max_width=_TEXT_COLUMNS, no_wrap=True)
        table.add_column("length", justify="right")
        table.add_column("numbers", no_wrap=True)
        for n, (text, vector) in enumerate(zip(self._texts, self._rows, strict=True), 1):
            numbers = ", ".join(f"{number:.3f}" for number in vector[:_NUMBERS_SHOWN])
            more = ", …" if size > _NUMBERS_SHOWN else ""
            table.add_row(str(n), _plain(text), f"{float(np.linalg.norm(vector)):.2f}", f"{numbers}{more}")
        console.print(table)
        if self._total > len(self._texts):
            console.print(f"and {self._total - len(self._texts)} more; -o vectors.npy writes all of them")
        if 2 <= self._total <= _MATRIX_ROWS:
            self._print_similarities()

    def _print_similarities(self) -> None:
        console = output_console()
        matrix = np.stack(self._rows)
        matrix = matrix / np.maximum(np.linalg.norm(matrix, axis=1, keepdims=True), 1e-12)
        console.print("similarity (cosine: 1 for the same direction)")
        table = framed_table(console)
        table.add_column("", justify="right")
        for n in range(len(matrix)):
            table.add_column(str(n + 1), justify="right")
        for n, row in enumerate(matrix @ matrix.T, 1):
            table.add_row(str(n), *(f"{value:.2f}" for value in row))
        console.print(table)


def writer_of(name: FormatName, out: BinaryIO, num_texts: int) -> VectorWriter:
    """The writer of a form; a table is written to standard output."""
    match name:
        case "npy":
            return NpyWriter(out, num_texts)
        case "jsonl":
            return JsonLinesWriter(out)
        case "csv":
            return CsvWriter(out)
        case "table":
            return TableWriter()


def _number(number: np.float32) -> str:
    """The shortest decimal that reads as the same float32, in JSON, too."""
    return str(number)


def _plain(text: str) -> str:
    """A text for one row: no control characters, and nothing that rich takes for markup."""
    from rich.markup import escape

    flat = "".join(char if char.isprintable() else " " for char in text)
    return escape(flat if len(flat) <= _TEXT_COLUMNS else flat[: _TEXT_COLUMNS - 1] + "…")
