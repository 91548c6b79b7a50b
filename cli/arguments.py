"""The command line as text: arguments that are not UTF-8 are refused, and output never fails for a character."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from ..runtime.text import check_os_text


def check_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments, which must be Unicode text.

    Raises:
        ConfigError: one is not; the message names its place and not its text, which may be a key.
    """
    return [check_os_text(text, _place(arguments, index)) for index, text in enumerate(arguments)]


def show_what_cannot_be_encoded(streams: Iterable[object]) -> None:
    """Write a replacement for characters that the encoding of a stream lacks, instead of an error.

    A terminal or a pipe may have any encoding (`LC_ALL=C` with `PYTHONUTF8=0` is ASCII).
    """
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def _place(arguments: Sequence[str], index: int) -> str:
    """`argument 3 (--api-key)`, counted from 1."""
    own, before = arguments[index], arguments[index - 1] if index else ""
    option = own.partition("=")[0] if own.startswith("--") and "=" in own else before
    named = option.startswith("-") and len(option) > 1 and option.isascii()
    return f"argument {index + 1} ({option})" if named else f"argument {index + 1}"
