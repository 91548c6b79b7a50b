"""The rows of a workload file: JSON Lines, one JSON array, or CSV with a header, found by the file's beginning."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from ...runtime.errors import ConfigError

_HEAD_BYTES: Final = 4096
_FIRST_ENTRY_BYTES: Final = 1 << 20
_BOM: Final = b"\xef\xbb\xbf"
_BINARY: Final = {
    b"\x1f\x8b": "compressed with gzip; unpack it",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; unpack it",
    b"BZh": "compressed with bzip2; unpack it",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"PAR1": "a Parquet file; write it as JSON Lines or CSV",
    b"ARROW1": "an Arrow file; write it as JSON Lines or CSV",
}


class PlacedRow(NamedTuple):
    """A row, and its place for messages, `file:line`."""

    place: str
    values: Mapping[str, Any]


def rows_of(path: Path) -> Generator[PlacedRow]:
    """All rows in order; those of JSON Lines and CSV are read one by one.

    Raises:
        ConfigError: the file cannot be read, or a row is no object.
    """
    head = _head(path)
    if head.startswith(b"["):
        yield from _array(path)
    elif head.startswith(b"{"):
        yield from _lines(path)
    elif b"," in head.split(b"\n", 1)[0]:
        yield from _csv(path)
    else:
        raise ConfigError(
            f"{path} is no workload: it must be a trace or conversations, as JSON Lines, a JSON array, or CSV with a "
            f"header"
        )


def first_row(path: Path) -> Mapping[str, Any]:
    """The first row; it tells the kind of the file.

    Raises:
        ConfigError: as for `rows_of`, or there is none.
    """
    head = _head(path, _FIRST_ENTRY_BYTES)
    if head.startswith(b"["):  # an array may be large, and is read again
        with contextlib.suppress(ValueError):
            entry, _ = json.JSONDecoder().raw_decode(head[1:].decode(errors="replace").lstrip())
            return _object(entry, f"{path}, entry 0")
    with contextlib.closing(rows_of(path)) as rows:
        for row in rows:
            return row.values
    raise ConfigError(f"{path} has no rows")


def _head(path: Path, num_bytes: int = _HEAD_BYTES) -> bytes:
    try:
        with path.open("rb") as file:
            head = file.read(num_bytes).removeprefix(_BOM).lstrip()
    except OSError as error:
        raise ConfigError(f"cannot read the workload {path}: {error.strerror}") from None
    for magic, what in _BINARY.items():
        if head.startswith(magic):
            raise ConfigError(f"{path} is {what}")
    return head


def _array(path: Path) -> Generator[PlacedRow]:
    try:
        entries = msgspec.json.decode(path.read_bytes().removeprefix(_BOM), type=list[Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a JSON array: {error}") from None
    for number, entry in enumerate(entries):
        yield PlacedRow(f"{path}, entry {number}", _object(entry, f"{path}, entry {number}"))


def _lines(path: Path) -> Generator[PlacedRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(_BOM)
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                entry = msgspec.json.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise ConfigError(f"{place}: not a line of JSON: {error}") from None
            yield PlacedRow(place, _object(entry, place))


def _csv(path: Path) -> Generator[PlacedRow]:
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.reader(file, skipinitialspace=True)
        names = [name.strip() for name in next(reader)]
        for number, values in enumerate(reader, 2):
            if not values:
                continue
            if len(values) != len(names):
                raise ConfigError(
                    f"{path}:{number}: {len(values)} columns, but the header has {len(names)}: {', '.join(names)}"
                )
            yield PlacedRow(f"{path}:{number}", dict(zip(names, values, strict=True)))


def _object(entry: object, place: str) -> Mapping[str, Any]:
    if not isinstance(entry, dict):
        raise ConfigError(f"{place}: a row must be an object, {{...}}")
    return entry
