"""WordWrap: lines break between words, and no text is lost."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from engine.cli.chat.answer_text.word_wrap import WordWrap


def wrapped(text: str, width: int = 10, sizes: int = 1) -> str:
    wrap = WordWrap()
    pieces = [text[at : at + sizes] for at in range(0, len(text), sizes)]
    return "".join(wrap.feed(piece, width) for piece in pieces) + wrap.end(width)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one two three", "one two\nthree"),
        ("ten chars! next", "ten chars!\nnext"),
        ("a\n\n  b", "a\n\n  b"),
        ("eleven chars then", "eleven\nchars then"),
        ("ab averyveryverylongword x", "ab\naveryveryverylongword x"),
        ("日本語の文字列です", "日本語の文\n字列です"),
        ("ends \n", "ends \n"),
    ],
)
def test_lines_break_between_words(text, expected):
    assert wrapped(text) == expected


def test_a_word_is_written_when_it_is_complete():
    wrap = WordWrap()
    assert wrap.feed("hello wor", 80) == "hello"
    assert wrap.feed("ld.", 80) == ""
    assert wrap.feed("\n", 80) == " world.\n"


def test_escape_sequences_have_no_width():
    text = "\x1b[1mone two three\x1b[0m"
    assert wrapped(text, sizes=len(text)) == "\x1b[1mone two\nthree\x1b[0m"


def test_code_is_passed_on():
    wrap = WordWrap()
    assert wrap.feed("see ", 10) + wrap.pass_on("a long line of code\n") == "see a long line of code\n"


@given(st.text(alphabet="abcdefg \n日", max_size=80), st.integers(4, 20), st.integers(1, 9))
def test_nothing_is_lost_and_lines_fit(text, width, sizes):
    shown = wrapped(text, width, sizes)
    assert re.sub(r"\s", "", shown) == re.sub(r"\s", "", text)
    longest_word = max((cell_len(word) for word in re.findall(r"[^\s日]+", text)), default=0)
    if longest_word < width:
        assert all(cell_len(line.rstrip(" ")) <= width for line in shown.split("\n"))
