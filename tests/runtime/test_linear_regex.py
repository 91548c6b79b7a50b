"""Regular expressions in linear time: Python's `re` at every prefix, and what is refused."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from engine.runtime import linear_regex
from engine.runtime.linear_regex import LinearRegex, UnsupportedRegexError

PATTERNS = [
    "a+b",
    "(ab|cd)*x",
    "[^a]{2,3}b",
    "(?i)foo|bar",
    r"\d\d+\s",
    "^ab",
    r"\Aab?c",
    "a.c",
    "(?s)a.c",
    "x{3}",
    "(a|aa)+b",
]


@pytest.mark.parametrize(
    "pattern",
    [
        *PATTERNS,
        "(a?){20}a{5}b",
        r"[\w-]+@[\w.]+",
        "a??b",
        "(?:)c",
        "(){3}b",
        r"(?a)\wx|[\d\W]a",
        r"(?a:\w)x",
        "(?i)[^ab-c]{2}|[A-C]d",
        "(?i:X)(?-i:D)",
        "[^x]d[^ -b]",
    ],
)
def test_the_first_match_ends_where_that_of_re_does(pattern):
    rng = random.Random(1)
    for _ in range(100):
        text = "".join(rng.choice("abcxdDFo0 1\n-@.é") for _ in range(12))
        expected = next((n for n in range(1, 13) if re.search(pattern, text[:n])), None)
        whole, parts = LinearRegex(pattern), LinearRegex(pattern)
        assert whole.push(text) == expected
        found = next((n for n, char in enumerate(text, 1) if parts.push(char) is not None), None)
        assert found == expected


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?=a)b", "look-around"),
        ("(?<!a)b", "look-around"),
        (r"(a)\1", "back references"),
        ("(a)?(?(1)b|c)", "conditions"),
        ("a$", "or word boundaries"),
        (r"\bfoo", "or word boundaries"),
        ("a*", "matches the empty text"),
        ("(", "is no regular expression"),
        ("(?>a)b", "atomic groups"),
        ("x*+", "possessive repetitions"),
        ("a{300}", "more than 256 states"),
        ("(((a{9}){9}){9}){9}", "more than 256 states"),
        ("(?m)^a", "the flag m"),
        ("(?m:^a)", "the flag m"),
        ("(?a)(?u)a", "ASCII and UNICODE flags are incompatible"),
    ],
)
def test_what_needs_more_than_one_pass_is_refused(pattern, reason):
    with pytest.raises(UnsupportedRegexError, match=reason):
        LinearRegex(pattern)


def test_nothing_that_is_repeated_takes_no_time():
    assert LinearRegex("(){1000000000}b").push("ab") == 2  # `re` runs out of memory here


def test_memory_for_transitions_is_bounded():
    regex = LinearRegex("[^a]{3}a")
    regex.push("".join(map(chr, range(0x4E00, 0x4E00 + 10_000))))
    assert len(regex._known) <= 4096


@pytest.mark.parametrize("flags", ["", "(?i)"])
def test_a_long_set_costs_its_length_once_for_a_character(monkeypatch, flags):
    """With a test for each state this took 100 ms for a character: 250 states, and 1,000 members each."""
    made, is_char = [], linear_regex._is_char

    def counted(*item: Any) -> linear_regex.IsChar:
        made.append(item)
        return is_char(*item)

    monkeypatch.setattr(linear_regex, "_is_char", counted)
    members = "".join(map(chr, range(0x4E00, 0x4E00 + 1000)))
    regex = LinearRegex(f"{flags}[^{members}]{{250}}X")
    assert len(made) == 2
    assert regex.push("abcd" * 100) is None
    assert regex.push("X") == 1
