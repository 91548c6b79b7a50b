"""Text from outside that may not be Unicode (no UTF-8, halves of surrogate pairs); `counted`, `LoopRule`.

Python passes such bytes on as lone surrogates (`surrogateescape`), and a JSON or YAML escape can name one. Neither has
a UTF-8 form, so it would fail later, in an encoder. An input that decides something is refused with the position of
the byte; text that is only shown is replaced.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import Final, NamedTuple

from .errors import ConfigError


class LoopRule(NamedTuple):
    """The rule for texts that repeat themselves without end; `engine chat` and the page stop such an answer.

    Attributes:
        min_chars, min_times: a loop is so many characters of so many equal units.
        window_chars: the part of the text, up to its end, that is looked at.
    """

    min_chars: int = 1000
    min_times: int = 8
    window_chars: int = 4000


LOOP: Final = LoopRule()
_BYTE_ORDER_MARK: Final = "\ufeff"
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def decode_utf8(data: bytes, what: str) -> str:
    """The text of bytes in UTF-8, without a byte order mark.

    Args:
        what: names the source in the error: `standard input`, `--schema FILE`.

    Raises:
        ConfigError: the bytes are not UTF-8.
    """
    try:
        return data.decode().removeprefix(_BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{what} is not UTF-8 text: byte 0x{data[error.start]:02x} at position {error.start}"
        ) from None


def check_os_text(text: str, what: str) -> str:
    """An argument, a variable or a path as the system gives it, if it is Unicode.

    Raises:
        ConfigError: its bytes are not UTF-8, or not in the encoding of the locale.
    """
    if not is_unicode(text):
        data = os.fsencode(text)
        decode_utf8(data, what)
        position = next(index for index, byte in enumerate(data) if byte > 0x7F)
        raise ConfigError(
            f"{what} is not in the encoding of this locale ({sys.getfilesystemencoding()}): byte "
            f"0x{data[position]:02x} at position {position}; set PYTHONUTF8=1"
        )
    return text


def variable(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """An environment variable; None if it is not set or empty.

    Raises:
        ConfigError: it is not UTF-8.
    """
    value = (os.environ if environ is None else environ).get(name)
    return check_os_text(value, f"${name}") if value else None


def is_unicode(text: str) -> bool:
    """Whether a text has no lone surrogate, so that it has a UTF-8 form."""
    return text.isascii() or _SURROGATE.search(text) is None


def replace_surrogates(text: str) -> str:
    """The text to show: pairs of surrogates are joined, lone ones become U+FFFD."""
    return text if is_unicode(text) else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def counted(number: int | str, noun: str, plural: str = "", *, commas: bool = False) -> str:
    """The number and the noun in its form; a word instead of a number ("auto") takes the plural.

    Args:
        plural: if it is not the noun and an `s`.
        commas: between thousands: `1,024 pages`.
    """
    shown = f"{number:,}" if commas and isinstance(number, int) else number
    return f"{shown} {noun if number == 1 else plural or f'{noun}s'}"
