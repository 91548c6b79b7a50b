"""`JsonState`: the position at the end of a JSON text, read byte by byte.

The search for the end of an answer (`closing.py`) and `CompletingMatcher` follow an answer with it.
"""

from __future__ import annotations

import copy
from typing import Final

_NUMBER: Final = b"0123456789+-.eE"
_END_OF_ARRAY: Final = 0x5D
_QUOTE: Final = 0x22
_BACKSLASH: Final = 0x5C
_UNICODE: Final = 0x75
BLANKS: Final = b" \t\r\n"


class JsonState:
    """The position at the end of a JSON text. It checks nothing: the grammar does.

    Attributes:
        in_string: the end is inside a string or the name of a field.
        escape_len: bytes of an escape that are missing: 0 outside of one, 1 after a backslash, 4 to 1 after `u`.
        utf8_len: continuation bytes that the last character of a string lacks.
        is_name: the string is the name of a field.
        last: the last byte that is no whitespace, outside of strings; 0 at the beginning.
        num_begun: values and members that were begun so far; a comma begins one, too.
    """

    __slots__ = (
        *("_is_unicode", "_open", "escape_len", "in_string", "is_name", "last", "num_begun", "utf8_len"),
    )

    def __init__(self) -> None:
        self.in_string = False
        self.is_name = False
        self.escape_len = 0
        self.utf8_len = 0
        self.last = 0
        self.num_begun = 0
        self._is_unicode = False
        self._open = b""  # the brackets that are not closed

    def read(self, data: bytes) -> None:
        """Append bytes."""
        for byte in data:
            if self.in_string:
                self._read_string_byte(byte)
            elif byte not in BLANKS:
                self._read_sign(byte)

    def copy(self) -> JsonState:
        """An independent state at the same position."""
        return copy.copy(self)

    @property
    def depth(self) -> int:
        """Objects and arrays that are open."""
        return len(self._open)

    @property
    def is_first(self) -> bool:
        """The position is outside of strings, and the first value of the document or of an array would begin here."""
        return not self.in_string and self.last in b"\x00["

    @property
    def in_number(self) -> bool:
        """The last sign belongs to a number."""
        return not self.in_string and self.last in _NUMBER

    @property
    def kind(self) -> tuple[bool, int, int, bool]:
        """The part of the position that the effect of a token depends on."""
        return self.in_string, self.escape_len, self.utf8_len, self.is_first

    def _read_sign(self, byte: int) -> None:
        self.num_begun += byte in b'"{[,' or (self.is_first and byte != _END_OF_ARRAY)
        if byte == _QUOTE:
            self.in_string = True
            self.is_name = self._open.endswith(b"{") and self.last in b"{,"
        elif byte in b"{[":
            self._open += bytes((byte,))
        elif byte in b"}]":
            self._open = self._open[:-1]
        self.last = byte

    def _read_string_byte(self, byte: int) -> None:
        if self.escape_len:
            if byte == _UNICODE and not self._is_unicode:
                self.escape_len, self._is_unicode = 4, True
            else:
                self.escape_len -= 1
            self._is_unicode = self._is_unicode and self.escape_len > 0
        elif byte == _BACKSLASH:
            self.escape_len = 1
        elif byte == _QUOTE:
            self.in_string, self.last = False, byte
        elif byte >= 0xC0:
            self.utf8_len = 1 + (byte >= 0xE0) + (byte >= 0xF0)
        elif self.utf8_len:
            self.utf8_len -= 1
