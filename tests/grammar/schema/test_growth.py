"""`growth_of` is at least the bytes of a short document of any part of a schema, and small for a small schema."""

from __future__ import annotations

from typing import Any

import pytest

from engine.grammar.schema.check import check_schema
from engine.grammar.schema.growth import growth_of

from ..conftest import compact

LONG = "a" * 40


def closed(**properties: Any) -> dict[str, Any]:
    """An object that has all of these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS = [
    {"type": "string", "minLength": 40},
    {"const": LONG},
    {"enum": [LONG, LONG + "b"]},
    {"type": "number", "minimum": 1e-12, "maximum": 1e-11},
    {"type": "integer", "minimum": 10**15},
    {"type": "string", "pattern": "^(?:abcdefghij){9}$"},
    {"type": "string", "format": "uuid"},
    {"type": "array", "items": {"const": LONG}, "minItems": 3},
    {"type": "array", "prefixItems": [{"const": LONG}, {"const": LONG}], "minItems": 2},
    closed(**{LONG: {"type": "null"}}),
    closed(a={"const": LONG}, b={"const": LONG}),
    closed(a={"$ref": "#/$defs/a"}) | {"$defs": {"a": closed(b={"const": LONG})}},
    closed(a={"allOf": [{"type": "string"}, {"minLength": 40}]}),
    closed(a={"anyOf": [{"const": LONG}, {"const": LONG + "b"}]}),
    {"type": "object", "additionalProperties": {"const": LONG}, "minProperties": 2},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_a_short_document_is_within_the_bound(schema):
    report = check_schema(schema, strict=False, at="schema")
    least = len(compact(report.sample)) if report.has_sample else 40

    assert growth_of(report.text) >= least
    array = {"type": "array", "items": schema, "$defs": schema.get("$defs", {})}
    inside = check_schema(array, strict=False, at="schema")
    assert growth_of(inside.text) >= least, "the value may be begun once more"


@pytest.mark.parametrize(
    "schema", [{}, {"type": "null"}, {"type": "array", "items": {}}, {"type": "integer"}]
)
def test_a_small_schema_has_a_small_bound(schema):
    assert 0 < growth_of(check_schema(schema, strict=False, at="schema").text) <= 8


def test_a_recursive_schema_has_a_bound():
    node = closed(name={"const": LONG}, next={"anyOf": [{"$ref": "#"}, {"type": "null"}]})

    assert growth_of(check_schema(node, strict=False, at="schema").text) >= len(LONG)
