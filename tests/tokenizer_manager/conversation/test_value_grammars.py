"""One reading of schemas: what a grammar of calls lets come is read back as arguments that the schema allows."""

from __future__ import annotations

import json
import random
from typing import Any, Final

import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLTokenizer

from engine.grammar.schema.check import check_schema
from engine.runtime.grammar_use import GrammarSpec, Whitespace
from engine.tokenizer_manager.conversation.conversation import Tool
from engine.tokenizer_manager.conversation.deltas import CallArguments, CallBegin, CallEnd
from engine.tokenizer_manager.conversation.parameters import ALL_KINDS, Parameters, Unenforceable, json_of
from engine.tokenizer_manager.conversation.parsing.families import FAMILIES, Form
from engine.tokenizer_manager.conversation.tool_grammars import ToolGrammars
from engine.tokenizer_manager.conversation.value_grammars import FORMAT_TEXTS, searching
from tests.selection import examples
from tests.tokenizer_manager.conversation.parsing.answers import parse

ALL: Final = " ".join(sorted(ALL_KINDS))
BYTES: Final = LLTokenizer("byte")
BY_ARGUMENT: Final = sorted(
    name for name, family in FAMILIES.items() if family.form in (Form.TAGGED, Form.PYTHONIC)
)
VALUES: Final[list[Any]] = [
    {"enum": ["red", "blue"]},
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "string", "pattern": "^[a-c]+x|q$", "maxLength": 9},
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"type": ["string", "integer"], "minLength": 2},
    {
        "anyOf": [
            {"type": "string", "maxLength": 4},
            {"type": "integer", "minimum": 10},
            {"type": "array", "items": {"type": "boolean"}},
        ]
    },
    {},
    {"type": "boolean"},
    {"type": ["boolean", "string"]},
    {"type": ["null", "boolean"]},
    {"enum": ["1", 1, None, True]},
    {"const": "x y"},
    {"const": 5},
    {"type": "number", "exclusiveMinimum": 1, "maximum": 3},
    {"allOf": [{"type": "string"}, {"minLength": 2}, {"maxLength": 3}]},
    {"$ref": "#/$defs/S"},
    {
        "type": "object",
        "properties": {"a": {"enum": ["</parameter>", "</arg_value>"]}},
        "required": ["a"],
        "additionalProperties": False,
    },
]
OBJECTS: Final[list[dict[str, Any]]] = [
    {
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
    },
    {
        "required": ["zz"],
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": {"type": "integer"},
    },
    {
        "anyOf": [
            {"properties": {"k": {"const": "x"}}, "required": ["k"]},
            {"properties": {"k": {"const": "y"}, "n": {"type": "integer"}}, "required": ["k", "n"]},
        ]
    },
    {"properties": {name: {"type": "integer"} for name in "abc"}, "required": ["b"]},
    {
        "properties": {
            name: {"type": "integer"} for name in ("$f", "größe", "a b", 'q"x', "a:b", "a=b", "a>b")
        },
        "required": ["$f", "größe"],
        "additionalProperties": False,
    },
    {
        "$ref": "#/$defs/A",
        "$defs": {
            "A": {
                "type": "object",
                "properties": {"n": {"$ref": "#/$defs/A"}},
                "additionalProperties": False,
            }
        },
    },
    {"additionalProperties": {"type": "string", "maxLength": 3}},
    {
        "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "boolean"}},
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
        "additionalProperties": False,
    },
    {
        "oneOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"$ref": "#/$defs/B"},
        ],
        "$defs": {
            "B": {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]},
        },
    },
    {
        "allOf": [
            {"properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a"]},
            {"properties": {"a": {"maximum": 5}}},
        ]
    },
]
SCHEMAS: Final = [
    {
        "type": "object",
        "properties": {"v": value},
        "required": ["v"],
        "additionalProperties": False,
        "$defs": {"S": {"type": ["string", "null"], "maxLength": 3}},
    }
    for value in VALUES
] + [{"type": "object", **schema} for schema in OBJECTS]
HINTS: Final = ("null", "true", "None", "1", "12", "5.5", "ab", "qwx", "\n", " ", "NaN")


def random_answer(spec: GrammarSpec, rng: random.Random, end: str) -> str | None:
    """A text of the grammar; None if it did not end soon."""
    matcher = LLMatcher(BYTES, spec.text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    answer = bytearray()
    hints = [list(text.encode()) for text in (*HINTS, *[end] * 6) if text]
    for _ in range(1500):
        if matcher.is_stopped() or (matcher.is_accepting() and rng.random() < 0.5):
            return answer.decode()
        hint = rng.choice(hints)
        if rng.random() < 0.4 and matcher.validate_tokens(hint) == len(hint):
            tokens = hint
        else:
            allowed = [token for token, bias in enumerate(matcher.compute_logit_bias()) if bias]
            plain = [token for token in allowed if 32 <= token < 127 or token == 10]
            tokens = [rng.choice(plain or allowed)]
        matcher.consume_tokens(tokens)
        answer += bytes(tokens)
    return None


def strict_call(family: str, schema: dict[str, Any]) -> tuple[Tool, GrammarSpec]:
    """A tool of a schema as the planner prepares it, and the grammar of a call."""
    checked = check_schema(schema, strict=True, at="p").schema
    assert isinstance(checked, dict)
    tool = Tool(name="f", parameters=checked, strict=True)
    made = ToolGrammars(
        FAMILIES[family], [tool], parallel=False, whitespace=Whitespace.COMPACT, marker_id=lambda _: None
    )
    made.check(tool)
    return tool, made.required(leading_space=False)


@pytest.mark.parametrize("family", BY_ARGUMENT)
@pytest.mark.parametrize("index", range(len(SCHEMAS)))
def test_what_a_strict_grammar_lets_come_is_read_back_as_the_schema_allows(family: str, index: int):
    schema = SCHEMAS[index]
    tool, spec = strict_call(family, schema)
    validator = jsonschema_rs.validator_for(schema)
    found = 0
    for seed in range(examples(6)):
        text = random_answer(spec, random.Random(seed), "".join(FAMILIES[family].parameter_end))
        if text is None:
            continue
        found += 1
        deltas = parse([text], family, tools=(tool,))
        assert parse(list(text), family, tools=(tool,)) == deltas
        assert [type(delta) for delta in deltas] == [CallBegin, CallArguments, CallEnd], text
        assert isinstance(deltas[1], CallArguments)
        validator.validate(json.loads(deltas[1].text))
    assert found


@pytest.mark.parametrize("family", BY_ARGUMENT)
def test_calls_of_tools_without_strict_are_read_back_whole(family: str):
    """A value that looked like a list and had one quote in it took the rest of the answer with it."""
    properties: dict[str, Any] = {"v": {}, "s": {"type": "string"}, "a\nb": {"type": "string"}, "x>=y": {}}
    tool = Tool(name="f", parameters={"type": "object", "properties": properties})
    spec = ToolGrammars(
        FAMILIES[family], [tool], parallel=True, whitespace=Whitespace.COMPACT, marker_id=lambda _: None
    ).required(leading_space=False)
    for seed in range(examples(20)):
        text = random_answer(spec, random.Random(seed), "".join(FAMILIES[family].parameter_end))
        if text is None:
            continue
        deltas = parse([text], family, tools=(tool,))
        assert parse(list(text), family, tools=(tool,)) == deltas
        assert [type(delta) for delta in deltas] == [CallBegin, CallArguments, CallEnd] * (len(deltas) // 3)
        for delta in deltas[1::3]:
            assert isinstance(delta, CallArguments)
            assert json.loads(delta.text).keys() <= properties.keys()


@pytest.mark.parametrize(
    "value", ["[[1], {'a': [True, None]}]", '{"a": {"b": 1e5}}', "[]", "'it\\'s'", "-1.5", "[1,2]"]
)
def test_values_of_python_may_be_nested(value: str):
    tool = Tool(name="f", parameters={"type": "object", "properties": {"v": {}}})
    spec = ToolGrammars(
        FAMILIES["pythonic"], [tool], parallel=True, whitespace=Whitespace.COMPACT, marker_id=lambda _: None
    ).required(leading_space=False)
    matcher = LLMatcher(BYTES, spec.text, log_level=0)
    data = list(f"[f(v={value})]".encode())
    assert matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize("name", sorted(FORMAT_TEXTS))
def test_texts_of_formats_are_valid(name: str):
    schema = {"type": "object", "properties": {"v": {"type": "string", "format": name}}, "required": ["v"]}
    tool, spec = strict_call("qwen3_coder", schema)
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    for seed in range(examples(6)):
        if (text := random_answer(spec, random.Random(seed), "\n</parameter>\n")) is not None:
            deltas = parse([text], "qwen3_coder", tools=(tool,))
            assert isinstance(deltas[1], CallArguments)
            validator.validate(json.loads(deltas[1].text))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"patternProperties": {"^x": {"type": "integer"}}}, "patternProperties at the top"),
        ({"required": ["a</b"], "additionalProperties": {"type": "integer"}}, ""),
        ({"required": ["a>b"], "additionalProperties": {"type": "integer"}}, "the name 'a>b' of a required"),
        ({"properties": {"a": {"type": "string", "pattern": "(^a|b)c"}}}, "an anchor inside a group"),
    ],
)
def test_what_a_tagged_format_cannot_enforce_is_named(schema: dict[str, Any], reason: str):
    if not reason:
        strict_call("qwen3_coder", {"type": "object", **schema})
        return
    with pytest.raises(Unenforceable, match=reason):
        strict_call("qwen3_coder", {"type": "object", **schema})


@pytest.mark.parametrize(
    ("pattern", "whole"),
    [
        ("^a$", "(?:a)"),
        ("a", r"(?:.|\n)*(?:a)(?:.|\n)*"),
        ("^a|b$", r"(?:a)(?:.|\n)*|(?:.|\n)*(?:b)"),
        (r"^[|^$]\$", r"(?:[|^$]\$)(?:.|\n)*"),
        ("^(?:a|b)$", "(?:(?:a|b))"),
        ("^", r"(?:.|\n)*"),
    ],
)
def test_a_pattern_that_may_match_anywhere_as_one_of_the_whole_text(pattern: str, whole: str):
    assert searching(pattern) == whole


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"type": "string"}, "string"),
        ({"type": "number"}, "integer number"),
        ({"type": ["boolean", "null"]}, "true false null"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string null"),
        ({"oneOf": [{"const": "a"}, {"const": 1}]}, "string integer"),
        ({"allOf": [{"type": ["string", "null"]}, {"type": "string"}]}, "string"),
        ({"$ref": "#/$defs/S"}, "string null"),
        ({"$ref": "#/$defs/missing"}, ALL),
        ({"enum": ["a", None, 2.5, True]}, "string null number true"),
        ({"type": ["string", "integer"], "enum": ["a", "b"]}, "string"),
        ({"pattern": "a"}, "string"),
        ({"format": "date"}, "string"),
        ({"items": {}}, "array"),
        ({}, ALL),
        (True, ALL),
        ({"type": 5, "enum": "x", "anyOf": {}}, ALL),
        ({"type": "any"}, ALL),
        ({"type": "STRING"}, "string"),
        ({"type": "str"}, "string"),
        ({"type": "int"}, "integer"),
        ({"type": ["float", None]}, "integer number null"),
        ({"type": "bool"}, "true false"),
    ],
)
def test_kinds_of_values(schema: Any, kinds: str):
    root = {
        "type": "object",
        "properties": {"v": schema},
        "$defs": {"S": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
    }
    assert Parameters(root).kinds("v") == set(kinds.split())


def test_a_schema_that_references_unfold_without_end_is_read_in_no_time():
    """Each reference is followed 32 levels deep: without a limit this takes days, and the event loop waits."""
    levels = {f"D{level}": {"anyOf": [{"$ref": f"#/$defs/D{level + 1}"}] * 8} for level in range(14)}
    properties = {"a": {"$ref": "#/$defs/A"}, "d": {"$ref": "#/$defs/D0"}, "s": {"type": "string"}}
    loop = {"anyOf": [{"$ref": "#/$defs/A"}] * 8}
    schema = {"type": "object", "properties": properties, "$defs": {"A": loop, **levels}}
    texts, none = (
        {**schema, "$defs": {**levels, "A": loop, "D14": last}} for last in ({"minLength": 1}, False)
    )

    parameters = Parameters(texts)
    assert parameters.kinds("a") == parameters.kinds("d") == ALL_KINDS
    assert parameters.kinds("s") == {"string"}
    assert "1,024 parts" in Parameters({**none, "$ref": "#/$defs/D0"}).unenforceable
    del properties["a"]
    for family in BY_ARGUMENT:
        with pytest.raises(Unenforceable, match="a schema of more than 1,024 parts"):
            strict_call(family, texts)


@pytest.mark.parametrize(
    ("text", "kinds", "value"),
    [
        ("12345", "string null", "12345"),
        ("true", "string null", "true"),
        (" null ", "string null", None),
        ("NaN", "number integer", "NaN"),
        ("-Infinity", ALL, "-Infinity"),
        ("[1, NaN]", "array", "[1, NaN]"),
        ("5.5", "integer", "5.5"),
        ("5.0", "integer", 5.0),
        ("true", "true false", True),
        ("False", "true false", False),
        ('"a"', "string null", '"a"'),
        ("[1, 'x', None]", "array", [1, "x", None]),
        ("[1, 'x', None]", "array string", "[1, 'x', None]"),
        ('{"a": 1, "a": 2}', "object", {"a": 2}),
        ("{1: 'a', '1': 'b'}", "object", {"1": "b"}),
        ("{(1, 2): 3}", "object", "{(1, 2): 3}"),
        ("'\\ud800'", "array", "'\\ud800'"),
    ],
)
def test_a_text_is_a_value_of_a_kind_that_the_schema_allows_or_a_string(text: str, kinds: str, value: object):
    def refuse(name: str) -> float:
        raise AssertionError(name)

    found = json_of(text, frozenset(kinds.split()))
    assert json.loads(found, parse_constant=refuse) == value
    assert found.count('"a":') <= 1


@pytest.mark.parametrize(
    ("text", "kinds", "value"),
    [
        ("'it'", "string", "it"),
        ("12345", "string", "12345"),
        ("1.5", "integer", 1.5),
        ("nan", "number", "nan"),
        ("[float('nan')]", "array", "[float('nan')]"),
        ("'\\ud800'", "string", "?"),
    ],
)
def test_a_python_value_keeps_its_kind_unless_it_may_be_a_string(text: str, kinds: str, value: object):
    assert json.loads(json_of(text, frozenset(kinds.split()), quoted=True)) == value


@pytest.mark.parametrize(
    ("family", "answer"),
    [
        ("qwen3_coder", "<tool_call>\n<function=f>\n{}{}</function>\n</tool_call>"),
        ("pythonic", "[f({}, {})]"),
    ],
)
def test_of_two_values_of_one_name_the_first_is_taken(family: str, answer: str):
    tool = Tool(
        name="f",
        parameters={"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}},
    )
    for key, values, first in (("n", "12", "1"), ("s", "ab", '"a"')):
        parts = [
            f"<parameter={key}>\n{value}\n</parameter>\n" if family == "qwen3_coder" else f"{key}='{value}'"
            for value in values
        ]
        if family == "pythonic" and key == "n":
            parts = ["n=1", "n=2"]
        deltas = parse(list(answer.format(*parts)), family, tools=(tool,))
        assert deltas[1:2] == [CallArguments(0, f'{{"{key}": {first}}}')]
