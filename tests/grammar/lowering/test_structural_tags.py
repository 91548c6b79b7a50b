"""Structural tags in both shapes."""

from __future__ import annotations

from typing import Any

import pytest

from engine.grammar.backend import GrammarError
from engine.grammar.lowering.structural_tags import StructuralTags
from engine.runtime.config.answer_config import RequestLimits
from engine.runtime.grammar_use import GrammarUse, Whitespace

from ..byte_grammar import ByteGrammar

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def use_of(tag: dict[str, Any], *, strict: bool = False) -> GrammarUse:
    reader = StructuralTags(
        "response_format", strict=strict, limits=RequestLimits(), whitespace=Whitespace.COMPACT
    )
    return reader.use(tag)


def grammar_of(format_: dict[str, Any]) -> ByteGrammar:
    use = use_of({"type": "structural_tag", "format": format_})
    assert use.spec is not None and use.triggered == ()
    grammar = ByteGrammar(use.spec)
    assert grammar.error == "", use.spec.text
    return grammar


def tag(begin: str, content: dict[str, Any], end: Any = "</f>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


SCHEMA = {"type": "json_schema", "json_schema": CITY}
WORD = {"type": "regex", "pattern": "[a-z]+"}


def test_the_older_shape_has_one_grammar_for_each_trigger():
    use = use_of(
        {
            "type": "structural_tag",
            "structures": [
                {"begin": "<function=a>", "schema": CITY, "end": "</function>"},
                {"begin": "<function=b>", "schema": {"type": "integer"}, "end": "</function>"},
                {"begin": "[x]", "schema": {"type": "boolean"}, "end": ""},
            ],
            "triggers": ["<function=", "[x"],
        }
    )

    first, second = use.triggered
    assert use.spec is None and not use.ends_after_first
    assert (first.trigger, second.trigger) == (b"<function=", b"[x")
    assert ByteGrammar(first.spec).accepts('a>{"city":"Rome"}</function>')
    assert ByteGrammar(first.spec).accepts("b>7</function>")
    assert not ByteGrammar(first.spec).accepts('b>{"city":"Rome"}</function>')
    assert ByteGrammar(second.spec).accepts("]true")


def test_triggered_tags_at_the_top_are_grammars_in_free_text():
    tags = {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag("<f=a>", SCHEMA), tag("<f=b>", WORD)]}

    use = use_of({"format": {**tags, "stop_after_first": True}})

    assert use.ends_after_first and use.spec is None
    assert ByteGrammar(use.triggered[0].spec).accepts("=b>word</f>")
    assert not ByteGrammar(use.triggered[0].spec).accepts("=b>Word</f>")


@pytest.mark.parametrize(
    ("format_", "accepted", "refused"),
    [
        ({"type": "const_string", "value": "hi"}, ["hi"], ["h", "hi!"]),
        (SCHEMA, ['{"city":"x"}'], ["{}"]),
        (WORD, ["abc"], ["", "A"]),
        ({"type": "grammar", "grammar": 'root ::= "a" root | "b"'}, ["aab"], ["a"]),
        ({"type": "grammar", "grammar": 'start: "a" start | "b"'}, ["aab"], ["a"]),
        ({"type": "any_text"}, ["", "anything\nat all {"], []),
        (
            {"type": "sequence", "elements": [{"type": "const_string", "value": "x="}, SCHEMA, WORD]},
            ['x={"city":"y"}abc'],
            ["x=abc"],
        ),
        (
            {"type": "or", "elements": [SCHEMA, {"type": "const_string", "value": "none"}]},
            ['{"city":""}', "none"],
            [""],
        ),
        (tag("<f>", SCHEMA), ['<f>{"city":"x"}</f>'], ['<f>{"city":"x"}']),
        (tag("<f>", WORD, ["</f>", "</g>"]), ["<f>a</f>", "<f>a</g>"], ["<f>a"]),
        (
            tag("<think>", {"type": "any_text"}, "</think>"),
            ["<think>a < b</think>"],
            ["<think>a", "<think></think>x"],
        ),
        (
            {"type": "sequence", "elements": [tag("<think>", {"type": "any_text"}, "</think>"), SCHEMA]},
            ['<think>hm {}</think>{"city":"x"}'],
            ['<think>hm</think> {"city":"x"}', '{"city":"x"}'],
        ),
        (
            {"type": "sequence", "elements": [{"type": "any_text"}, tag("<f>", WORD), WORD]},
            ["some text<f>abc</f>d", "<f>a</f>d"],
            ["text", "text<f>A</f>d"],
        ),
        (
            {
                "type": "tags_with_separator",
                "tags": [tag("<f>", WORD)],
                "separator": ",",
                "at_least_one": True,
            },
            ["<f>a</f>", "<f>a</f>,<f>b</f>"],
            ["", "<f>a</f><f>b</f>"],
        ),
        (
            {"type": "tags_with_separator", "tags": [tag("<f>", WORD)], "separator": ""},
            ["", "<f>a</f><f>b</f>"],
            [","],
        ),
        (
            {
                "type": "tags_with_separator",
                "tags": [tag("<f>", WORD)],
                "separator": ",",
                "stop_after_first": True,
            },
            ["", "<f>a</f>"],
            ["<f>a</f>,<f>b</f>"],
        ),
        (
            {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag("<f>", WORD)], "at_least_one": True},
            ["<f>a</f>", "<f>a</f> and <f>b</f>!"],
            ["a <f>a</f>", "<f>A</f>", "<f>a</f> and <f>B</f>"],
        ),
        (
            {
                "type": "sequence",
                "elements": [
                    {"type": "const_string", "value": "> "},
                    {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag("<f>", WORD)]},
                ],
            },
            ["> ", "> text", "> a <f>b</f> c"],
            ["> a <f>B</f>"],
        ),
    ],
)
def test_a_tree_is_the_grammar_of_the_whole_answer(format_, accepted, refused):
    grammar = grammar_of(format_)

    assert [text for text in accepted if not grammar.accepts(text)] == []
    assert [text for text in refused if grammar.accepts(text)] == []


@pytest.mark.parametrize(
    ("given", "at", "text"),
    [
        ({}, "", "neither"),
        ({"format": 5}, ".format", "must be an object"),
        ({"format": {"type": "qwen_xml_parameter"}}, ".format.type", '"qwen_xml_parameter" is not supported'),
        ({"format": {"type": "const_string"}}, ".format.value", "must be a string"),
        ({"format": {"type": "sequence", "elements": []}}, ".format.elements", "not empty"),
        (
            {"format": {"type": "sequence", "elements": [{"type": "x"}]}},
            ".format.elements[0].type",
            "not supported",
        ),
        ({"format": tag("<f>", {"type": "regex", "pattern": "("})}, ".format.content.pattern", "not closed"),
        ({"format": tag("", WORD)}, ".format.begin", "must be a string"),
        ({"format": tag("<f>", WORD, [])}, ".format.end", "a string or a list"),
        (
            {"format": {"type": "json_schema", "json_schema": {"type": "x"}}},
            ".format.json_schema",
            "must be one of",
        ),
        (
            {"format": {"type": "sequence", "elements": [{"type": "any_text"}, WORD]}},
            ".format.elements[0]",
            "any_text must be the last",
        ),
        (
            {"format": {"type": "triggered_tags", "triggers": ["<g"], "tags": [tag("<f>", WORD)]}},
            ".format.triggers[0]",
            "no tag begins with",
        ),
        (
            {"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["a", "ab"]},
            ".triggers[1]",
            "no tag begins with",
        ),
        (
            {"structures": [{"schema": {}, "end": ""}], "triggers": ["a"]},
            ".structures[0].begin",
            "must be a string",
        ),
        ({"structures": [], "triggers": ["a"]}, ".structures", "not empty"),
        ({"structures": [{"begin": "b", "end": ""}], "triggers": []}, ".triggers", "not empty"),
    ],
)
def test_errors_name_the_place(given, at, text):
    with pytest.raises(GrammarError) as caught:
        use_of(given)

    assert caught.value.at == f"response_format{at}"
    assert caught.value.message.startswith(f"response_format{at}: ") and text in caught.value.message


def test_depth_is_bounded():
    node: dict[str, Any] = WORD
    for _ in range(100):
        node = {"type": "or", "elements": [node]}

    with pytest.raises(GrammarError) as caught:
        use_of({"format": node})

    assert caught.value.code == "schema_too_complex"


def test_strict_reaches_the_schemas_inside():
    format_ = {"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}}

    with pytest.raises(GrammarError) as caught:
        use_of({"format": format_}, strict=True)

    assert caught.value.at == "response_format.format.json_schema"
