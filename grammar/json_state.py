"""`JsonState`: the position in a JSON text that grows token by token: in a string, in an escape, after which byte."""

from __future__ import annotations

from typing import Final

_QUOTE: Final = 0x22
_BACKSLASH: Final = 0x5C
_UNICODE: Final = 0x75
_BLANKS: Final = b" \t\r\n"


class JsonState:
    """The position at the end of a JSON text. It checks nothing: the grammar does.

    Attributes:
        in_string: the end is inside a string or the name of a field.
        escape_len: bytes of an escape that are missing: 0 outside of one, 1 after a backslash, 4 to 1 after `u`.
        utf8_len: continuation bytes that the last character of a string lacks.
        is_name: the string is the name of a field.
        last: the last byte that is no whitespace, outside of strings; 0 at the beginning.
    """

    __slots__ = ("_is_unicode", "_open", "escape_len", "in_string", "is_name", "last", "utf8_len")

    def __init__(self) -> None:
        self.in_string = False
        self.is_name = False
        self.escape_len = 0
        self.utf8_len = 0
        self.last = 0
        self._is_unicode = False
        self._open = b""  # the brackets that are not closed

    def read(self, data: bytes) -> None:
        """Append bytes."""
        for byte in data:
            if self.in_string:
                self._read_string_byte(byte)
            elif byte not in _BLANKS:
                self._read_sign(byte)

    def copy(self) -> JsonState:
        """An independent state at the same position."""
        twin = JsonState.__new__(JsonState)
        twin.in_string, twin.escape_len, twin.utf8_len = self.in_string, self.escape_len, self.utf8_len
        twin.last, twin._is_unicode = self.last, self._is_unicode
        twin.is_name, twin._open = self.is_name, self._open
        return twin

    def _read_sign(self, byte: int) -> None:
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
