"""Reads files of a model folder, which are untrusted: JSON objects, and what a damaged file really is.

`library_errors` turns a library's exceptions about a damaged file into `ConfigError`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ..runtime.errors import ConfigError

_LFS: Final = b"version https://git-lfs.github.com/spec/"
_PAGES: Final = (b"<!doctype html", b"<html")
_HEAD_BYTES: Final = 256


def stand_in(path: Path) -> str | None:
    """Say which kind of stand-in `path` is, and the fix; None: it looks like neither, or cannot be read."""
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return None
    if head.startswith(_LFS):
        return (
            "a Git LFS pointer, not the file itself; run `git lfs pull` in its folder, or download the file"
        )
    if head.lstrip().lower().startswith(_PAGES):
        return "a web page, not a model file; download the file itself (private models need a token)"
    return None


def damage(path: Path, otherwise: str) -> str:
    """The message for a file that is not what it must be: `path: <what it is>; <what to do>`."""
    found = stand_in(path)
    return f"{path}: {otherwise}" if found is None else f"{path}: it is {found}"


logger = logging.getLogger(__name__)

_MAX_BYTES: Final = 64 << 20
_MAX_NAMED: Final = 8  # fields in a warning
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
"""A lone surrogate has no UTF-8 form: it would fail later with an unclear error, so the file is checked here."""


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in `path`.

    If a field appears twice, the last value counts, as in other JSON readers; if the values differ, a warning is
    logged.

    Raises:
        ConfigError: the file is missing, unreadable, too large, not JSON, or not an object.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(
                f"{path}: larger than {_MAX_BYTES >> 20} MiB, this cannot be a configuration file"
            )
        data = path.read_bytes()
        value, doubtful = _parse(data)
        if _SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()  # a UnicodeEncodeError is a ValueError, too
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; the model folder is incomplete, download it again"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(damage(path, f"not valid JSON ({error}); download it again")) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a JSON {type(value).__name__}, expected an object")
    if doubtful:
        logger.warning(
            "%s: twice in one object, with different values: %s; the last ones are taken",
            path,
            ", ".join(map(repr, doubtful[:_MAX_NAMED])),
        )
    return value


def _parse(data: bytes) -> tuple[object, list[str]]:
    """The value, and the names of fields that appear twice with different values."""
    doubtful: list[str] = []

    def fields_of(pairs: list[tuple[str, object]]) -> dict[str, object]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            doubtful.extend(name for name, value in pairs if fields[name] != value)
        return fields

    return json.loads(data, object_pairs_hook=fields_of), doubtful


_MAX_QUOTED_CHARS: Final = 300
"""Longest part of the library's message, which may quote the file."""


@contextlib.contextmanager
def library_errors(before: str, behind: str = "") -> Iterator[None]:
    """Turn any exception raised inside into a ConfigError: `before`, the library's message, `behind`.

    The tokenizers library raises plain `Exception`. If its Rust code panics (for example on a merge that is shorter
    than its required prefix) it raises `PanicException`, which cannot be imported and is not an `Exception`.

    Raises:
        ConfigError: an exception was raised inside.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ConfigError(f"{before}{str(error)[:_MAX_QUOTED_CHARS]}{behind}") from error


def is_panic(error: BaseException) -> bool:
    """Whether a library's Rust code has panicked."""
    return type(error).__name__ == "PanicException"
