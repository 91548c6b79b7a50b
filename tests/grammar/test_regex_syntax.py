"""`checked_regex` against Python's `re`: the same texts match, and what no grammar can express is refused by place."""

from __future__ import annotations

import json
import random
import re

import pytest

from engine.grammar.lowering.lark import regex
from engine.grammar.regex_syntax import RegexError, checked_regex
from engine.runtime.grammar_use import GrammarKind, GrammarSpec, Whitespace

from .byte_grammar import ByteGrammar

PIECES = [
    "a",
    "b",
    "-",
    "[ab]",
    "[^a]",
    "[a-c]",
    ".",
    "\\d",
    "\\.",
    "^",
    "$",
    "(",
    "(?:",
    ")",
    "|",
    "*",
    "+",
    "?",
    "{1,2}",
    "{2}",
    "\\\\",
    "/",
    "[",
    "]",
    "{",
    "}",
    "&&",
    "[a&&b]",
    "[a[]",
    "[]a]",
    "(?i)",
    "(?=a)",
    "\\1",
    "\\b",
    "\\S",
    "\\u0041",
    "[\\w-]",
    "[^\\s]",
    "\\t",
    "\\-",
    "#",
    "~",
    "é",
    ",",
    "(?P<x>",
    "'",
    '"',
]
TEXTS = ["", *"ab-1A\n\\/&[]{}é ._#~", "ab", "aa", "a-", "aab", "abc", "a1", "a\nb", "ba", "aaa"]


def grammar_of(pattern: str, *, whole: bool) -> ByteGrammar:
    checked = checked_regex(pattern, whole=whole)
    if whole:
        return ByteGrammar(GrammarSpec(GrammarKind.LARK, f"start: {regex(checked)}"))
    schema = json.dumps({"type": "string", "pattern": checked})
    return ByteGrammar(GrammarSpec(GrammarKind.JSON_SCHEMA, schema, Whitespace.COMPACT))


@pytest.mark.filterwarnings("ignore:Possible :FutureWarning")
@pytest.mark.parametrize("whole", [True, False])
def test_random_patterns_match_what_they_match_in_python(whole):
    draw = random.Random(5)
    num_compared = 0
    for _ in range(1500):
        pattern = "".join(draw.choice(PIECES) for _ in range(draw.randint(1, 5)))
        try:
            python = re.compile(pattern, 0 if whole else re.ASCII)
            grammar = grammar_of(pattern, whole=whole)
        except (RegexError, re.error):
            continue
        assert not grammar.error or "mpty" in grammar.error, (pattern, grammar.error)
        if grammar.error or "\\S" in pattern or "\\s" in pattern:
            continue
        for text in TEXTS:
            expected = python.fullmatch(text) if whole else python.search(text)
            if expected is not None and "$" in pattern and text.endswith("\n"):
                continue  # Python's $ matches in front of a last newline too
            shown = text if whole else json.dumps(text, ensure_ascii=False)
            assert grammar.accepts(shown) == (expected is not None), (pattern, text)
            num_compared += 1

    assert num_compared > 5000


@pytest.mark.parametrize(
    ("pattern", "position", "unsupported"),
    [
        ("ab(?=c)", 2, True),
        ("(?!a)b", 0, True),
        ("(?<=a)b", 0, True),
        ("(?<!a)b", 0, True),
        (r"(a)\1", 3, True),
        (r"(?P<n>a)(?P=n)", 8, True),
        (r"\bword", 0, True),
        ("a^b", 1, True),
        ("a$b", 1, True),
        ("(a$|b)c", 2, True),
        ("(^a)*", 4, True),
        ("a++", 2, True),
        ("(?>a)", 0, True),
        ("a(b", 1, False),
        ("a)b", 1, False),
        ("[ab", 0, False),
        ("[]", 0, False),
        ("[z-a]", 1, False),
        ("*a", 0, False),
        ("a**", 2, False),
        ("a{3,1}", 1, False),
        ("a{x}", 1, False),
        ("a{1000000}", 1, False),
        (r"\q", 0, False),
        ("ab\\", 2, False),
        (r"\ud800", 0, False),
        ("[[:alpha:]]", 1, False),
        ("(?m)a", 0, False),
        ("(" * 200, 100, False),
    ],
)
def test_what_cannot_be_used_is_refused_by_place(pattern, position, unsupported):
    with pytest.raises(RegexError) as caught:
        checked_regex(pattern, whole=True)

    assert (caught.value.position, caught.value.unsupported) == (position, unsupported)
    assert str(caught.value).endswith(f"at character {position}")


@pytest.mark.parametrize("pattern", ["^ab$", r"\Aab\z", r"^ab\Z", "(?:^ab$)", "^ab|ab$"])
def test_anchors_at_the_ends_are_dropped(pattern):
    grammar = grammar_of(pattern, whole=True)

    assert grammar.accepts("ab")
    assert not grammar.accepts("abc")
    assert "^" not in checked_regex(pattern, whole=True)


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [
        (r"^\d$", "٣", False),
        (r"^\w$", "é", False),
        (r"^.$", "\u2028", False),
        (r"^.$", "\r", False),
        (r"^\s$", "\ufeff", True),
        (r"^[^\S]$", "\u00a0", True),
        (r"^[a-\d]$", "-", True),
        (r"^\cJ$", "\n", True),
    ],
)
def test_a_pattern_of_a_schema_is_ecmascript(pattern, text, matches):
    assert grammar_of(pattern, whole=False).accepts(json.dumps(text, ensure_ascii=False)) == matches
