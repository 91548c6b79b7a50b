"""`check_schema`: what clients send, what is refused by name and place, and what is approximated with a warning."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar.backend import GrammarError
from engine.grammar.schema.check import check_schema
from engine.grammar.schema.keywords import KEYWORDS, Fate
from engine.grammar.schema.report import SchemaReport
from engine.runtime.config.answer_config import RequestLimits
from engine.runtime.grammar_use import GrammarKind, GrammarSpec, Whitespace
from tests.selection import examples

from ..byte_grammar import ByteGrammar

CODES = {
    "invalid_schema",
    "unsupported_schema",
    "unsatisfiable_schema",
    "invalid_regex",
    "schema_too_complex",
}
NODE = {
    "type": "object",
    "properties": {
        "value": {"type": "integer"},
        "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
    },
    "required": ["value", "next"],
    "additionalProperties": False,
}


def check(schema: Any, *, strict: bool = True, **options: Any) -> SchemaReport:
    return check_schema(schema, strict=strict, at="s", **options)


def accepts(report: SchemaReport, document: Any) -> bool:
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return ByteGrammar(GrammarSpec(GrammarKind.JSON_SCHEMA, report.text, Whitespace.COMPACT)).accepts(text)


def refused(schema: Any, *, strict: bool = True, **options: Any) -> GrammarError:
    with pytest.raises(GrammarError) as caught:
        check(schema, strict=strict, **options)
    assert caught.value.message.startswith(f"{caught.value.at}: ")
    return caught.value


# ---------------------------------------------------------------- what clients send


def test_a_pydantic_model_passes_as_strict():
    report = check(
        {
            "$defs": {
                "Color": {"enum": ["red", "green"], "title": "Color", "type": "string"},
                "Cat": {
                    "properties": {"kind": {"const": "cat", "title": "Kind", "type": "string"}},
                    "required": ["kind"],
                    "title": "Cat",
                    "type": "object",
                },
                "Dog": {
                    "properties": {
                        "kind": {"const": "dog", "type": "string"},
                        "age": {"type": "integer", "minimum": 0},
                    },
                    "required": ["kind", "age"],
                    "type": "object",
                },
            },
            "additionalProperties": False,
            "description": "A model.",
            "properties": {
                "name": {"maxLength": 10, "minLength": 1, "title": "Name", "type": "string"},
                "color": {"allOf": [{"$ref": "#/$defs/Color"}], "default": "red"},
                "born": {"anyOf": [{"format": "date", "type": "string"}, {"type": "null"}], "default": None},
                "pet": {
                    "discriminator": {
                        "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"},
                        "propertyName": "kind",
                    },
                    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
                },
                "scores": {
                    "additionalProperties": {"type": "number"},
                    "propertyNames": {"$ref": "#/$defs/Color"},
                    "type": "object",
                },
            },
            "required": ["name", "pet"],
            "title": "Person",
            "type": "object",
        }
    )

    assert report.warnings == []
    assert accepts(report, {"name": "Ada", "color": "green", "born": None, "pet": {"kind": "dog", "age": 3}})
    assert accepts(report, {"name": "Ada", "pet": {"kind": "cat"}, "scores": {"red": 1.5}})
    assert not accepts(report, {"name": "Ada", "pet": {"kind": "dog"}})
    assert not accepts(report, {"name": "Ada", "pet": {"kind": "cat"}, "scores": {"blue": 1}})
    assert not accepts(report, {"name": "Ada", "born": "2021-02-29", "pet": {"kind": "cat"}})
    assert report.compact_sample == '{"name":"a","pet":{"kind":"cat"}}'


def test_recursive_schemas_pass():
    for root in ({"$ref": "#/$defs/Node", "$defs": {"Node": NODE}}, {**NODE, "$defs": {"Node": NODE}}):
        report = check(root)
        assert accepts(report, {"value": 1, "next": {"value": 2, "next": None}})
        assert not accepts(report, {"value": 1, "next": {"value": "2", "next": None}})
        assert report.compact_sample == '{"value":0,"next":null}'


def test_zod_s_integers_and_records_pass_as_strict():
    most = 2**53 - 1
    report = check(
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {
                "n": {"type": "integer", "minimum": -most, "maximum": most},
                "r": {
                    "type": "object",
                    "propertyNames": {"type": "string"},
                    "additionalProperties": {"type": "boolean"},
                },
            },
            "required": ["n", "r"],
            "additionalProperties": False,
        }
    )

    assert accepts(report, {"n": -5, "r": {"x": True}})
    assert not accepts(report, {"n": 2**53, "r": {}})


def test_draft_4_and_7_are_read_as_2020_12():
    report = check(
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "id": "http://example.com/root",
            "definitions": {"n": {"id": "#n", "type": "integer", "minimum": 3, "exclusiveMinimum": True}},
            "type": "array",
            "items": [{"$ref": "#n"}, {"$ref": "http://example.com/root#/definitions/n"}],
            "additionalItems": False,
        }
    )

    assert accepts(report, [4, 5])
    assert not accepts(report, [3])
    assert not accepts(report, [4, 5, 6])


NOT_WITH_A: list[Any] = [{}, 1, "x", [], {"a": "x"}]


def test_a_container_without_type_means_its_type_xgrammar_104():
    report = check({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, explain=True)

    assert accepts(report, {"a": 1})
    assert accepts(report, {"a": 1, "b": 2})
    assert not any(accepts(report, document) for document in NOT_WITH_A)
    assert "no type is given; object is meant" in {finding.reason for finding in report.findings}


def test_keywords_beside_anyof_keep_its_types():
    report = check({"type": ["object", "null"], "allOf": [{"properties": {"a": {"type": "integer"}}}]})

    assert accepts(report, None)
    assert accepts(report, {"a": 1})


def test_key_order_is_the_schema_s():
    report = check({"type": "object", "properties": {"b": {}, "a": {}}, "required": ["a", "b"]})

    assert accepts(report, {"b": 1, "a": 1})
    assert not accepts(report, {"a": 1, "b": 1})


# ---------------------------------------------------------------- no schema


@pytest.mark.parametrize(
    ("schema", "at", "text"),
    [
        (
            {"properties": {"age": {"type": "strin"}}},
            "s/properties/age",
            'type is "strin", but it must be one of null',
        ),
        ({"properties": {"a/b~": {"type": 3}}}, "s/properties/a~1b~0", "type is 3"),
        ({"type": []}, "s", "empty list"),
        ({"items": 5}, "s/items", "a schema is an object"),
        ({"anyOf": []}, "s", "at least one schema"),
        ({"required": "a"}, "s", "list of strings"),
        ({"properties": {"a": {"required": True}}}, "s/properties/a", "beside properties"),
        ({"minLength": -1}, "s", "at least 0"),
        ({"minLength": 1.5}, "s", "integer"),
        ({"minimum": "1"}, "s", 'minimum is "1"'),
        ({"multipleOf": 0}, "s", "above 0"),
        ({"enum": {}}, "s", "must be a list"),
        ({"$ref": "#/$defs/a", "$defs": {"b": {}}}, "s", "not in the schema; there are #/$defs/b"),
        ({"$ref": "https://example.com/x"}, "s", "must stay inside the schema"),
        ({"$ref": 5}, "s", "must be a string"),
        ({"properties": []}, "s", "must be an object"),
        ({"not": 5}, "s", "not is 5"),
        ("x", "s", "a schema is an object"),
        (None, "s", "a schema is an object"),
    ],
)
def test_what_is_no_schema_is_named(schema, at, text):
    for strict in (True, False):
        error = refused(schema, strict=strict)
        assert (error.code, error.at) == ("invalid_schema", at)
        assert text in error.message


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "number", "minimum": 10, "maximum": 5}, "minimum 10 is above maximum 5"),
        ({"type": "number", "exclusiveMinimum": 5, "maximum": 5}, "no number lies between"),
        ({"type": "integer", "minimum": 0.2, "maximum": 0.8}, "no integer lies between"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength 3 is above maxLength 2"),
        ({"enum": []}, "enum is empty"),
        (False, "the schema is false"),
        ({"type": "string", "const": 1}, "no value of const has the type string"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, 'property "a" is required, but'),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "not among the properties"),
        ({"type": "array", "items": False, "minItems": 1}, "minItems is 1, but"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "contains itself without end"),
        (
            {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
            "contains itself without end",
        ),
        ({"anyOf": [False, {"type": "string", "enum": [1]}]}, "false"),
        ({"not": {}}, "false"),
    ],
)
def test_what_no_document_fits_is_refused(schema, text):
    error = refused(schema, strict=False)

    assert error.code == "unsatisfiable_schema"
    assert text in error.message


@pytest.mark.parametrize(
    ("schema", "at"),
    [
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "/properties/a"),
        (
            {
                "$ref": "#/$defs/node",
                "$defs": {
                    "node": {
                        "type": "object",
                        "properties": {"n": {"$ref": "#/$defs/node"}},
                        "required": ["n"],
                    }
                },
            },
            "/$defs/node",
        ),
        (
            {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
            "/items",
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/b"}},
                "required": ["a"],
                "$defs": {
                    "b": {"type": "object", "properties": {"c": {"$ref": "#/$defs/c"}}, "required": ["c"]},
                    "c": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
                },
            },
            None,
        ),
    ],
)
def test_a_schema_that_requires_itself_without_end_is_refused_with_one_reason(schema, at):
    error = refused(schema, strict=False)

    assert error.code == "unsatisfiable_schema"
    assert error.message.count("it contains itself without end") == 1
    assert error.message.count(", but") == 1
    if at is not None:
        assert error.at.endswith(at)


# ---------------------------------------------------------------- what is not enforced


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("uniqueItems", {"type": "array", "uniqueItems": True}),
        ("contains", {"type": "array", "contains": {"type": "integer"}}),
        ("not", {"not": {"type": "string"}}),
        ("if", {"if": {"type": "string"}, "then": {"minLength": 3}}),
        ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
        ("minProperties", {"type": "object", "properties": {"a": {}}, "minProperties": 1}),
        ("minProperties", {"type": "object", "minProperties": 2}),
        ("propertyNames", {"type": "object", "propertyNames": {"minLength": 2}}),
        ("patternProperties", {"type": "object", "patternProperties": {"a": {}, "b": {}}}),
        ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "number"}]}),
        ("pattern", {"type": "string", "pattern": "^(?=a)b"}),
        ("format", {"type": "string", "format": "idn-email"}),
        ("multipleOf", {"type": "number", "multipleOf": 1e-15}),
        ("maximum", {"type": "number", "maximum": 1e30}),
        ("minlength", {"type": "string", "minlength": 3}),
        ("unevaluatedProperties", {"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}),
    ],
)
def test_imp_1567_a_keyword_is_never_dropped_silently(keyword, schema):
    report = check({"type": "object", "properties": {"p": schema}}, strict=False)
    error = refused({"type": "object", "properties": {"p": schema}}, strict=True)

    assert len(report.warnings) >= 1
    assert report.warnings[0].startswith("s/properties/p: ") and keyword in report.warnings[0]
    assert (error.code, error.at) == ("unsupported_schema", "s/properties/p")
    assert keyword in error.message


def test_the_message_has_the_way_out():
    error = refused({"properties": {"tags": {"type": "array", "uniqueItems": True}}})

    assert error.message == (
        "s/properties/tags: uniqueItems cannot be enforced here (a grammar does not remember earlier items); leave it "
        "out, and remove repeated items, or send strict: false and check it yourself"
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": False},
        {"type": "array", "uniqueItems": True, "maxItems": 1},
        {"type": "object", "unevaluatedProperties": False, "properties": {"a": {}}},
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}},
        {"type": "object", "minProperties": 1, "properties": {"a": {}}, "required": ["a"]},
        {"type": "object", "patternProperties": {"^a": {}, "^b": {}}},
        {"oneOf": [{"const": "a"}, {"const": "b"}, {"type": "integer"}]},
        {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 4}]},
        {
            "oneOf": [
                {"required": ["a"], "properties": {"a": {"const": 1}}},
                {"required": ["a"], "properties": {"a": {"const": 2}}},
            ]
        },
        {"type": "string", "contentEncoding": "base64", "format": "password"},
        {"x-order": 1, "$comment": "x", "examples": [1], "default": 2},
        {"contains": {}, "minContains": 0},
    ],
)
def test_keywords_that_restrict_nothing_more_pass_as_strict(schema):
    report = check(schema)

    assert report.warnings == []
    assert ByteGrammar(GrammarSpec(GrammarKind.JSON_SCHEMA, report.text)).error == ""


A_OR_B: Any = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"required": ["b", "c"]}
OPEN_B: Any = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "oneOf": [*A_OR_B]},
        {"oneOf": [*A_OR_B]},
        {"properties": {name: {"type": "integer"} for name in "abc"}, "oneOf": [*A_OR_B]},
        {"oneOf": [{"$ref": "#/$defs/B"}, A_OR_B[0]]},
        {"oneOf": [OPEN_B, *A_OR_B[:1], {"type": "null"}, {"type": "object", "required": ["c"]}]},
    ],
)
def test_branches_of_objects_that_require_different_names_forbid_those_of_the_others(schema):
    """The documents of the grammar fit one branch; of those that fit one, some with members of another are lost."""
    definitions = {"$defs": {"B": OPEN_B}}
    report = check({"type": "object", "properties": {"p": schema}, "required": ["p"], **definitions})
    validator = jsonschema_rs.validator_for({**schema, **definitions})
    names = [name for size in range(4) for name in itertools.combinations("abc", size)]
    documents = [dict.fromkeys(each, 1) for each in names]

    assert report.warnings == []
    found = [document for document in documents if accepts(report, {"p": document})]
    assert all(validator.is_valid(document) for document in found)
    assert {"a": 1} in found and len(found) > 1


SAME: Any = [{"required": ["a"]}, {"required": ["a", "b"]}]


@pytest.mark.parametrize("inner", [{"oneOf": SAME}, {"anyOf": [{"required": ["a"]}], "oneOf": SAME}])
@pytest.mark.parametrize("named", [False, True])
def test_a_branch_that_forbids_names_may_have_branches_itself(inner, named):
    branch = {"type": "object", "required": ["p"], **inner}
    definitions = {"$defs": {"X": branch}} if named else {}
    branches = [{"$ref": "#/$defs/X"} if named else branch, {"required": ["q"]}]
    report = check({"type": "object", "oneOf": branches, **definitions}, strict=False)

    documents = [{"p": 1, "a": 1}, {"p": 1, "a": 1, "b": 1}, {"q": 1}]
    assert all(accepts(report, document) for document in documents)
    assert not accepts(report, {"p": 1}) and not accepts(report, {"q": 1, "p": 1})
    assert len(report.warnings) == 1


def test_a_branch_does_not_forbid_what_all_values_must_have():
    """The first branch would be lost."""
    first = {"properties": {"type": {"const": "a"}, "x": {"type": "integer"}}, "required": ["x"]}
    second = {"properties": {"type": {"const": "b"}}, "required": ["type"]}
    schema = {"type": "object", "required": ["type"], "oneOf": [first, second]}
    report = check(schema, strict=False)
    assert accepts(report, {"type": "a", "x": 1}) and accepts(report, {"type": "b"})
    assert "oneOf cannot be enforced" in refused(schema).message


def test_branches_that_require_the_same_names_stay_refused():
    for branches in (A_OR_B[0], A_OR_B[0]), (A_OR_B[0], {"required": ["a", "b"]}), (OPEN_B, True):
        assert "oneOf cannot be enforced" in refused({"type": "object", "oneOf": [*branches]}).message


def test_branches_that_another_value_than_an_object_fits_stay_refused():
    branches = [{"type": ["object", "null"], "required": [name]} for name in "ab"]
    schema = {"type": "object", "properties": {"p": {"oneOf": branches}}, "required": ["p"]}
    assert "oneOf cannot be enforced" in refused(schema).message


@pytest.mark.parametrize("limits", [{}, {"maxLength": 300}, {"maxLength": 250, "pattern": "^[a-z@.]+$"}])
@pytest.mark.parametrize("first", [True, False])
def test_addresses_and_names_of_hosts_have_the_lengths_of_the_standards(limits, first):
    def fits(name: str, text: str) -> bool:
        node = {"format": name, **limits} if first else {**limits, "format": name}
        return accepts(check({"type": "string", **node}), text)

    label, most = "b" * 63, limits.get("maxLength", 999)
    assert fits("email", f"{'a' * 64}@{label}.{label}.co") and not fits("email", f"{'a' * 65}@b.co")
    assert not fits("email", f"a@{label}b.co")
    host = ".".join([label] * 4)
    for size in (250, 254, 255, 257):
        assert fits("email", f"a@{host}"[:size]) == (size <= min(254, most))
    for size in (250, 253, 254):
        assert fits("hostname", host[:size]) == (size <= min(253, most))
    assert not fits("hostname", f"{label}b.co")


def test_the_names_of_a_pattern_or_a_list_are_enforced():
    by_pattern = check(
        {"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "integer"}}
    )
    by_list = check(
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}}
    )

    for report in (by_pattern, by_list):
        assert accepts(report, {"a": 1})
        assert not accepts(report, {"c": 1})
        assert not accepts(report, {"a": "x"})


@pytest.mark.parametrize("keyword", ["$dynamicRef", "$recursiveRef"])
def test_dynamic_references_are_always_refused(keyword):
    assert refused({keyword: "#"}, strict=False).code == "unsupported_schema"


@pytest.mark.parametrize("value", [2**53 + 1, -(2**63), 1e300, "\x00", ["\x1b"]])
def test_values_that_would_become_others_are_refused(value):
    assert refused({"const": value}, strict=False).code == "unsupported_schema"
    assert refused({"enum": [1, value]}, strict=False).code == "unsupported_schema"


def test_a_pattern_with_a_syntax_error_is_an_invalid_regex():
    error = refused({"type": "string", "pattern": "a("}, strict=False)

    assert error.code == "invalid_regex"
    assert error.message == 's: pattern "a(": a group is not closed at character 1'


def test_a_recursive_reference_with_siblings_is_approximated():
    schema = {
        "$ref": "#/$defs/n",
        "$defs": {
            "n": {
                "type": "object",
                "properties": {"c": {"$ref": "#/$defs/n", "maxProperties": 3, "required": ["x"]}},
            }
        },
    }

    report = check(schema, strict=False)

    assert any("recursive" in warning for warning in report.warnings)
    assert accepts(report, {"c": {"c": {}}})
    assert not accepts(report, {"c": 1})
    assert refused(schema).code == "unsupported_schema"


def test_nullable_gets_a_warning_with_strict_too():
    assert 'add "null" to type' in check({"type": "string", "nullable": True}).warnings[0]


# ---------------------------------------------------------------- sizes


def nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def test_depth_does_not_end_the_process():
    assert refused(nested(30_000)).code == "schema_too_complex"
    assert check(nested(60)).warnings == []


def test_bytes_and_values_are_limited():
    limits = RequestLimits(max_schema_kb=1, max_json_items=100)

    assert "--max-schema-kb" in refused({"title": "x" * 2000}, limits=limits).message
    assert "--max-json-items" in refused({"enum": list(range(200))}, limits=limits).message
    assert refused({"enum": list(range(200))}, limits=limits).code == "schema_too_complex"


def test_long_chains_of_references_are_refused():
    def chain(length: int) -> Any:
        defs = {str(i): {"type": "array", "items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(length)}
        return {"$ref": "#/$defs/0", "$defs": {**defs, str(length): {"type": "integer"}}}

    assert refused(chain(2000)).code == "schema_too_complex"
    report = check(chain(190))
    assert ByteGrammar(GrammarSpec(GrammarKind.JSON_SCHEMA, report.text)).error == ""


def test_a_sample_does_not_explode():
    schema: Any = {"type": "integer"}
    for _ in range(20):
        schema = {"type": "array", "items": schema, "minItems": 10}

    assert check(schema).compact_sample is None


# ---------------------------------------------------------------- any input

_names = st.sampled_from(sorted(KEYWORDS)) | st.text(max_size=5)
_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["object", "string", "array", "#", "#/$defs/a", "date", "^a", "(", "[a-z]*"])
    | st.text(max_size=5)
)
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_names, inner, max_size=5),
    max_leaves=25,
)


@settings(max_examples=examples(300), deadline=None)
@given(_values, st.booleans())
def test_any_value_is_a_schema_or_an_error(value, strict):
    found: SchemaReport | GrammarError
    try:
        found = check_schema(value, strict=strict, at="s", explain=True)
    except GrammarError as error:
        found = error
    if isinstance(found, GrammarError):
        assert found.message.startswith(found.at) and found.at.startswith("s")
        assert found.code in CODES
    else:
        json.loads(found.text)
        assert not strict or all("nullable" in warning for warning in found.warnings)


def test_every_keyword_that_is_not_enforced_has_a_reason():
    for keyword, rule in KEYWORDS.items():
        assert rule.fate in (Fate.ENFORCED, Fate.ANNOTATION) or (rule.reason and rule.rewrite), keyword


# ---------------------------------------------------------------- numbers of any size

NUMBER_KEYWORDS = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "minLength"),
    *("maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "default"),
)
numbers = (
    st.sampled_from(
        [
            float("inf"),
            float("-inf"),
            float("nan"),
            10**400,
            -(10**400),
            10**5000,
            1e308,
            5e-324,
            2**53 + 1,
            2.5,
        ]
    )
    | st.floats()
    | st.integers()
)


@given(
    number=numbers,
    other=numbers,
    keyword=st.sampled_from(NUMBER_KEYWORDS),
    second=st.sampled_from(NUMBER_KEYWORDS),
    kind=st.sampled_from(["number", "integer", "string", "array", "object"]),
    strict=st.booleans(),
)
@settings(max_examples=examples(300))
def test_a_number_of_any_size_is_used_or_refused_by_place(number, other, keyword, second, kind, strict):
    schema = {"anyOf": [{"type": kind, keyword: number, second: other}, {"enum": [number, other]}]}
    refusals: list[GrammarError] = []
    try:
        json.loads(check(schema, strict=strict, explain=True).text)
    except GrammarError as error:
        refusals.append(error)
    assert all(each.code in CODES and each.message.startswith("s/anyOf/") for each in refusals)


@pytest.mark.parametrize(
    ("name", "text", "is_one"),
    [
        ("time", "12:30:00.123456789Z", True),
        ("time", "12:30:00.1234567891Z", False),
        ("date-time", "2024-02-29T12:30:00.5+01:00", True),
        ("date-time", "2024-02-29T12:30:00." + "3" * 10 + "Z", False),
        ("duration", "P1Y2M3DT4H5M6S", True),
        ("duration", "P4W", True),
        ("duration", "P" + "1" * 10 + "D", False),
    ],
)
def test_formats_have_no_endless_digits(name, text, is_one):
    assert accepts(check({"type": "string", "format": name}), text) is is_one
