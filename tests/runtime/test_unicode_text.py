"""Bytes that are not UTF-8 and lone surrogates: refused with a position where they decide, replaced where shown."""

from __future__ import annotations

import pytest

from engine.runtime.errors import ConfigError
from engine.runtime.text import check_os_text, decode_utf8, is_unicode, replace_surrogates, variable


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"caf\xe9", "byte 0xe9 at position 3"),  # Latin-1
        (b"\xff\xfe{\x00", "byte 0xff at position 0"),  # UTF-16
        (b"\xef\xbb\xbfcaf\xe9", "byte 0xe9 at position 6"),  # after a byte order mark
        (b"a\xed\xa0\x80", "byte 0xed at position 1"),  # a surrogate in UTF-8
        (b"\xc3", "byte 0xc3 at position 0"),  # cut
        (b"\xc0\x80", "byte 0xc0 at position 0"),  # not the shortest form
    ],
)
def test_bytes_that_are_not_utf8_are_refused_with_their_position(data, problem):
    with pytest.raises(ConfigError) as refused:
        decode_utf8(data, "standard input")
    assert str(refused.value) == f"standard input is not UTF-8 text: {problem}"


@pytest.mark.parametrize("text", ["", "café", "日本", "😀", "x"])
def test_utf8_is_decoded_with_or_without_a_byte_order_mark(text):
    assert decode_utf8(text.encode(), "x") == decode_utf8(b"\xef\xbb\xbf" + text.encode(), "x") == text
    assert check_os_text(text, "x") == text


def test_a_variable_that_is_not_utf8_is_named():
    with pytest.raises(ConfigError, match=r"^\$KEY is not UTF-8 text: byte 0xe9 at position 3$"):
        variable("KEY", {"KEY": "caf\udce9"})
    assert variable("KEY", {"KEY": ""}) is None
    assert variable("KEY", {}) is None
    assert variable("KEY", {"KEY": "é"}) == "é"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 😀", "plain é 😀"),
        ("a\ud83d", "a\N{REPLACEMENT CHARACTER}"),
        ("\ude00b", "\N{REPLACEMENT CHARACTER}b"),
        ("\ud83d\ude00", "😀"),
        ("\udce9", "\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_lone_surrogates_are_replaced_in_text_to_show(text, shown):
    assert replace_surrogates(text) == shown
    assert is_unicode(shown)
    assert is_unicode(text) == (text == shown)
