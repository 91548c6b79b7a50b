"""`constraint_of`: every spelling of a constraint, one at most, and errors with the client's own path."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.runtime.config.answer_config import AnswerConfig, RequestLimits
from engine.runtime.errors import RequestError
from engine.runtime.grammar_use import GrammarKind, GrammarSpec, Whitespace
from engine.tokenizer_manager.generation import Constraint
from engine.tokenizer_manager.http.schema.constraint_fields import ConstraintFields
from engine.tokenizer_manager.http.schema.constraints import check_room, constraint_of
from engine.tokenizer_manager.http.schema.values import convert

from ...fake_engine import TOKENIZER

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}


def constraint(
    fields: dict[str, Any], *, strict: bool = False, at: str = "", **config: Any
) -> Constraint | None:
    return constraint_of(
        convert(fields, ConstraintFields),
        AnswerConfig(**config),
        RequestLimits(),
        strict_server=strict,
        at=at,
    )


def spec_of(fields: dict[str, Any], **options: Any) -> GrammarSpec:
    made = constraint(fields, **options)
    assert made is not None and made.use.spec is not None
    return made.use.spec


def refused(fields: dict[str, Any], **options: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        constraint(fields, **options)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
            "response_format.schema",
        ),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema"),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, "structured_outputs.json"),
        ({"guided_json": SCHEMA}, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, "guided_json"),
        ({"json_schema": SCHEMA}, "json_schema"),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema"),
    ],
)
def test_all_spellings_of_a_schema_are_one_spec(fields, param):
    made = constraint(fields)

    assert made is not None and made.param == param
    assert made.use.spec == GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA, separators=(",", ":")))
    assert made.shortest == '{"a":0}'
    assert made.warnings == []


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_SCHEMA),
        ({"structured_outputs": {"json_object": True}}, GrammarKind.JSON_SCHEMA),
        ({"regex": "a+"}, GrammarKind.REGEX),
        ({"guided_regex": "a+"}, GrammarKind.REGEX),
        ({"structured_outputs": {"regex": "a+"}}, GrammarKind.REGEX),
        ({"guided_choice": ["a", "b"]}, GrammarKind.LARK),
        ({"structured_outputs": {"choice": ["a", "b"]}}, GrammarKind.LARK),
        ({"ebnf": 'root ::= "a"'}, GrammarKind.LARK),
        ({"grammar": 'root ::= "a"'}, GrammarKind.LARK),
        ({"guided_grammar": 'start: "a"'}, GrammarKind.LARK),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, GrammarKind.LARK),
    ],
)
def test_all_spellings_of_other_constraints(fields, kind):
    assert spec_of(fields).kind is kind


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": TAG},
        {"structural_tag": TAG},
        {"structural_tag": json.dumps(TAG)},
        {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
    ],
)
def test_all_spellings_of_a_structural_tag(fields):
    made = constraint(fields)

    assert made is not None and made.use.spec is None
    assert [each.trigger for each in made.use.triggered] == [b"<f"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None, "regex": None},
        {"response_format": {"type": "text"}},
        {"regex": "", "ebnf": "", "grammar": "", "json_schema": ""},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "json_object": False, "choice": None}},
        {"whitespace_pattern": " ?"},
    ],
)
def test_values_that_ask_for_nothing_are_free_text(fields):
    assert constraint(fields) is None


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"regex": "a", "ebnf": "b"}, ("regex", "ebnf")),
        (
            {"guided_json": SCHEMA, "response_format": {"type": "json_object"}},
            ("guided_json", "response_format"),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "regex": "a"}},
            ("structured_outputs.json", "structured_outputs.regex"),
        ),
    ],
)
def test_llama_cpp_11847_two_constraints_are_both_named(fields, names):
    error = refused(fields)

    assert error.code == "conflicting_constraints"
    assert all(name in error.message for name in names)
    assert error.param == names[1]


@pytest.mark.parametrize(
    ("fields", "param", "code", "text"),
    [
        (
            {"response_format": {"type": "xml"}},
            "response_format.type",
            "invalid_value",
            "must be one of text",
        ),
        ({"response_format": {}}, "response_format.type", "missing_field", "must be one of"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "missing_field",
            "is missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "missing_field",
            "is missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
            "response_format.json_schema.strict",
            "invalid_type",
            "true or false",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"properties": {"age": {"type": "strin"}}}},
                }
            },
            "response_format.json_schema.schema/properties/age",
            "invalid_schema",
            'type is "strin"',
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "strict": True,
                        "schema": {"properties": {"tags": {"type": "array", "uniqueItems": True}}},
                    },
                }
            },
            "response_format.json_schema.schema/properties/tags",
            "unsupported_schema",
            "uniqueItems cannot be enforced here",
        ),
        (
            {"guided_json": {"type": "number", "minimum": 10, "maximum": 5}},
            "guided_json",
            "unsatisfiable_schema",
            "above",
        ),
        ({"guided_json": "{"}, "guided_json", "invalid_schema", "not valid JSON"),
        ({"json_schema": "[" * 30_000 + "]" * 30_000}, "json_schema", "schema_too_complex", "nested"),
        (
            {"json_schema": json.dumps({"title": "x" * 600_000})},
            "json_schema",
            "schema_too_complex",
            "--max-schema-kb",
        ),
        ({"regex": "(?=a)"}, "regex", "invalid_regex", "at character 0"),
        ({"grammar": "root ::= x"}, "grammar", "invalid_grammar", "line 1"),
        (
            {"structured_outputs": {"choice": [1]}},
            "structured_outputs.choice",
            "invalid_type",
            "list of strings",
        ),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "invalid_type", "a string"),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": 1}},
            "structured_outputs.disable_additional_properties",
            "invalid_type",
            "true or false",
        ),
        ({"structural_tag": "5"}, "structural_tag", "invalid_grammar", "an object"),
        (
            {"structural_tag": {"format": {"type": "x"}}},
            "structural_tag.format.type",
            "invalid_grammar",
            "not supported",
        ),
        ({"guided_json": {}, "whitespace_pattern": "("}, "whitespace_pattern", "invalid_regex", "not closed"),
    ],
)
def test_errors_have_the_client_s_path(fields, param, code, text):
    error = refused(fields)
    nested = refused(fields, at="sampling_params")

    assert (error.param, error.code) == (param, code)
    assert error.message.startswith(param) and text in error.message
    assert nested.param == f"sampling_params.{param}"


def test_strict_of_the_server_makes_warnings_errors():
    fields = {"guided_json": {"type": "array", "uniqueItems": True}}
    warned = constraint(fields)

    assert warned is not None and "uniqueItems is not enforced" in warned.warnings[0]
    assert refused(fields, strict=True).code == "unsupported_schema"
    assert (
        refused({"guided_json": {"type": "string", "nullable": True}}, strict=True).code
        == "unsupported_schema"
    )


def test_unknown_fields_of_a_format_are_not_silent():
    fields = {"response_format": {"type": "json_object", "wibble": 1}}
    made = constraint(fields)

    assert made is not None and made.warnings == ["unknown field response_format.wibble was ignored"]
    assert refused(fields, strict=True).param == "response_format.wibble"


def test_the_rule_for_whitespace():
    assert spec_of({"guided_json": SCHEMA}).whitespace is Whitespace.PRETTY
    assert spec_of({"guided_json": SCHEMA}, json_whitespace="any").whitespace is Whitespace.ANY
    assert spec_of({"guided_json": SCHEMA, "whitespace_pattern": "[ ]?"}).whitespace_pattern == "[ ]?"
    options = {"json": SCHEMA, "disable_any_whitespace": True}
    assert spec_of({"structured_outputs": options}).whitespace is Whitespace.COMPACT
    assert spec_of({"guided_json": SCHEMA, "guided_whitespace_pattern": ""}).whitespace is Whitespace.COMPACT


OPEN = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}}}


@pytest.mark.parametrize(
    ("fields", "closed"),
    [
        ({"structured_outputs": {"json": OPEN, "disable_additional_properties": True}}, True),
        ({"structured_outputs": {"json": OPEN, "disable_additional_properties": False}}, False),
        ({"guided_json": OPEN}, False),
    ],
)
@pytest.mark.parametrize("by_server", [False, True])
def test_objects_are_closed_where_the_request_or_the_server_says_so(fields, closed, by_server):
    schema = json.loads(spec_of(fields, json_closed_objects=by_server).text)

    is_closed = [each.get("additionalProperties") is False for each in (schema, schema["properties"]["a"])]
    assert is_closed == [closed or by_server] * 2


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({}, {"type": "object"}),
        (True, {"type": "object"}),
        ({"title": "x"}, {"type": "object"}),
        ({"minProperties": 1}, {"type": "object", "minProperties": 1}),
        ({"type": "array"}, {"type": "array"}),
        ({"enum": [{"a": 1}]}, {"enum": [{"a": 1}]}),
    ],
)
def test_json_object_with_a_schema_is_an_object(schema, expected):
    fields = {"response_format": {"type": "json_object", "schema": schema}}

    assert json.loads(spec_of(fields).text) == expected


def test_room_for_the_shortest_answer():
    made = constraint({"guided_json": {"type": "array", "items": {"type": "boolean"}, "minItems": 20}})
    assert made is not None

    check_room(made, None, "max_tokens", TOKENIZER)
    check_room(made, 500, "max_tokens", TOKENIZER)
    with pytest.raises(RequestError) as caught:
        check_room(made, 5, "max_tokens", TOKENIZER)

    assert (caught.value.code, caught.value.param) == ("max_tokens_too_small", "max_tokens")
    assert "the shortest answer to guided_json has" in caught.value.message
