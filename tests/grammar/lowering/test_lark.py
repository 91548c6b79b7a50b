"""Lark texts with clients' texts, patterns and schemas inside."""

from __future__ import annotations

import json

import pytest

from engine.grammar.lowering.lark import LarkBuilder, embedded, json_rule, one_of, quoted, regex, schema_text
from engine.runtime.grammar_use import GrammarKind, GrammarSpec, Whitespace

from ..byte_grammar import ByteGrammar


def compiled(body: str) -> ByteGrammar:
    grammar = LarkBuilder()
    grammar.start(body)
    made = ByteGrammar(grammar.spec())
    assert made.error == ""
    return made


@pytest.mark.parametrize(
    "text",
    ["", "plain", 'a"b', "a\\b", "\n\t\r\x00\x1f\x7f", "é😀\u2028", "</x>", "%json {}", "//no #comment"],
)
def test_a_quoted_text_matches_itself_alone(text):
    grammar = compiled(quoted(text))

    assert grammar.accepts(text)
    assert not grammar.accepts(text + "x")


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("a/b", "a/b"),
        (r"a\/b", "a/b"),
        ("[/]+", "//"),
        ("a\nb", "a\nb"),
        ("", ""),
        (r"\\/", "\\/"),
        ("a#//b", "a#//b"),
    ],
)
def test_a_pattern_keeps_its_meaning(pattern, text):
    assert compiled(regex(pattern)).accepts(text)


def test_names_are_unique_and_never_start():
    grammar = LarkBuilder()

    names = [grammar.add_rule(name, quoted("a")) for name in ("f", "f", "start", "9", "Get Weather", "ä")]
    names += [grammar.add_terminal(name, quoted("a")) for name in ("f", "9")]
    grammar.start(" ".join(names))

    assert len(set(names)) == len(names) and "start" not in names
    assert ByteGrammar(grammar.spec()).accepts("a" * len(names))


def test_grammars_of_every_kind_are_embedded():
    schema = GrammarSpec(
        GrammarKind.JSON_SCHEMA, '{"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}'
    )
    pattern = GrammarSpec(GrammarKind.REGEX, "[a-z]/{2}")
    lark = GrammarSpec(GrammarKind.LARK, 'start: "(" start ")" | "}"')

    grammar = compiled(f"{embedded(schema)} {one_of([embedded(pattern), quoted('-')])} {embedded(lark)}")

    assert grammar.accepts("12-((}))")
    assert grammar.accepts("0q//}")
    assert not grammar.accepts("x-}")


@pytest.mark.parametrize(
    ("whitespace", "accepted", "refused"),
    [
        (Whitespace.COMPACT, ['{"a":[1,2]}'], ['{"a": 1}', '{\n"a":1}', ' {"a":1}']),
        (
            Whitespace.PRETTY,
            ['{"a":[1,2]}', '{"a": [1, 2]}', '{\n  "a": [\n    1\n  ]\n}'],
            ['{  "a":1}', '{\n\n"a":1}', '{"a":\t1}', '{"a":1}\n', " {}"],
        ),
        (Whitespace.ANY, ['{ \n\n\t"a" :  1}'], ['{"a":1} ', " {}"]),
    ],
)
def test_whitespace_is_bounded_as_it_is_said(whitespace, accepted, refused):
    grammar = compiled(json_rule({"type": "object"}, whitespace))

    assert all(map(grammar.accepts, accepted))
    assert not any(map(grammar.accepts, refused))


def test_a_pattern_for_whitespace_replaces_the_rule():
    grammar = compiled(json_rule({"type": "object"}, Whitespace.COMPACT, whitespace_pattern=" {0,2}"))

    assert grammar.accepts('{"a":  1}')
    assert not grammar.accepts('{"a":   1}')


def test_settings_of_the_library_in_a_schema_are_replaced():
    assert "lenient" not in schema_text({"x-guidance": {"lenient": True}})


def test_the_name_of_a_property_has_one_spelling():
    grammar = compiled(json_rule({"type": "object", "properties": {"a": {"type": "integer"}}}))

    assert not grammar.accepts('{"\\u0061": "x"}')
    assert grammar.accepts(json.dumps({"b\n": 'x\n\t"\\é'}, ensure_ascii=False))
