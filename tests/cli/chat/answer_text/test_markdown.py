"""MarkdownStyler: what is styled, what stays as it is, and that pieces of any size give the same."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cli.chat.answer_text.markdown import MarkdownStyler

BOLD, ITALIC, CYAN, DIM, RESET = "\x1b[1m", "\x1b[3m", "\x1b[36m", "\x1b[2m", "\x1b[0m"
FENCED = "Look:\n```python\nx = 2**3 # `y`\n```\nDone."


def styled(*pieces: str) -> str:
    styler = MarkdownStyler()
    parts = [part for piece in pieces for part in styler.feed(piece)] + styler.end()
    return "".join(part.text for part in parts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a **bold** b", f"a {BOLD}bold{RESET} b"),
        ("an *italic* word", f"an {ITALIC}italic{RESET} word"),
        ("call `f(**x)` now", f"call {CYAN}f(**x){RESET} now"),
        ("``a`b``", "``a`b``"),
        ("## A `b` c\nnext", f"{BOLD}A {CYAN}b{RESET}{BOLD} c{RESET}\nnext"),
        ("# End", f"{BOLD}End{RESET}"),
        (FENCED, f"Look:\n{DIM}```python{RESET}\n{CYAN}x = 2**3 # `y`\n{RESET}{DIM}```{RESET}\nDone."),
        ("```\nopen", f"{DIM}```{RESET}\n{CYAN}open{RESET}"),
    ],
)
def test_marks_become_styles(text, expected):
    assert styled(text) == expected
    assert styled(*text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "* a list\n* of things\n",
        "2 * 3 * 4 = 24, 2**10 = 1024",
        "pass **kwargs on",
        "an *unclosed mark\nand a line",
        "a ` alone",
        "#hashtag and C#",
        "****",
        "- item\n\n1. one\n",
        "snake_case_name __init__",
        " " * 5 + "# indented code",
        "``` `inline` ",
    ],
)
def test_other_text_stays(text):
    plain = re.sub(r"\x1b\[[0-9;]*m", "", styled(text))
    assert plain == text


@given(st.text(alphabet="ab `*#~\n", max_size=60), st.lists(st.integers(1, 7), max_size=60))
def test_pieces_of_any_size_give_the_same(text, sizes):
    pieces, rest = [], text
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    assert styled(*pieces, rest) == styled(text)


@given(st.text(alphabet="ab `*#~\n", max_size=60))
def test_no_character_but_marks_is_lost(text):
    plain = re.sub(r"\x1b\[[0-9;]*m", "", styled(text))
    marks = str.maketrans("", "", "`*# ")
    assert plain.translate(marks) == text.translate(marks)
    assert plain.count("\n") == text.count("\n")


def test_little_is_held_back():
    styler = MarkdownStyler()
    assert "".join(part.text for part in styler.feed("an *open mark")) == "an "
    shown = "".join(part.text for part in styler.feed(" and" * 200))
    assert shown.startswith("*open mark and")


def test_a_new_answer_begins_without_the_state_of_the_last():
    styler = MarkdownStyler()
    styler.feed("```\ncode")
    styler.end()
    assert "".join(part.text for part in styler.feed("plain\n")) == "plain\n"
