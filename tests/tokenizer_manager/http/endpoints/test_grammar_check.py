"""`POST /v1/grammar/check`, and constraints on their way through completions and `/generate`."""

from __future__ import annotations

import pytest

from engine.runtime.grammar_use import GrammarKind

from ...conftest import Serve, Served
from ...fake_engine import say_all

PATH = "/v1/grammar/check"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    },
    "required": ["name"],
    "title": "T",
}


def wanted(schema: object, *, strict: bool) -> dict[str, object]:
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "t", "strict": strict, "schema": schema},
        }
    }


def test_it_says_what_becomes_of_each_keyword(answering: Served):
    body = answering.client.post(PATH, json=wanted(SCHEMA, strict=False)).json()

    fates = {(each["pointer"], each["keyword"]): each["fate"] for each in body["keywords"]}
    assert body["ok"] and body["error"] is None
    assert fates["", "properties"] == "enforced"
    assert fates["", "title"] == "annotation"
    assert fates["/properties/tags", "uniqueItems"] == "approximated"
    assert body["num_keywords"] == len(body["keywords"])
    assert (body["kind"], body["whitespace"]) == ("json_schema", "pretty")
    assert body["shortest"]["text"] == '{"name":""}' and body["shortest"]["tokens"] > 3
    assert len(body["warnings"]) == 1


def test_a_refused_schema_is_explained_too(answering: Served):
    reply = answering.client.post(PATH, json=wanted(SCHEMA, strict=True))
    body = reply.json()

    assert reply.status_code == 200 and not body["ok"]
    assert body["error"]["code"] == "unsupported_schema"
    assert (
        body["constraint"] == body["error"]["param"] == "response_format.json_schema.schema/properties/tags"
    )
    [tags] = [each for each in body["keywords"] if each["fate"] == "approximated"]
    assert (tags["pointer"], tags["keyword"]) == ("/properties/tags", "uniqueItems")
    assert tags["rewrite"] and tags["reason"]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({}, "missing_field"),
        ({"regex": "a", "ebnf": "b"}, "conflicting_constraints"),
        ({"model": "x", "regex": "a"}, "model_not_found"),
    ],
)
def test_a_body_without_one_constraint_is_an_error(answering: Served, fields, code):
    reply = answering.client.post(PATH, json=fields)

    assert reply.status_code in (400, 404)
    assert reply.json()["error"]["code"] == code


@pytest.mark.parametrize(("fields", "kind"), [({"regex": "a+"}, "regex"), ({"ebnf": 'root ::= "a"'}, "lark")])
def test_other_constraints(answering: Served, fields, kind):
    body = answering.client.post(PATH, json=fields).json()

    assert (body["ok"], body["kind"], body["keywords"]) == (True, kind, [])


def test_completions_pass_the_constraint_on(serve: Serve):
    served = serve(say_all("{}"))
    schema = {"type": "array", "uniqueItems": True}
    body = served.client.post("/v1/completions", json={"prompt": "hi", **wanted(schema, strict=False)}).json()

    grammar = served.engine.next_request().grammar
    assert grammar is not None and grammar.spec is not None
    assert (grammar.spec.kind, grammar.spec.text) == (GrammarKind.JSON_SCHEMA, '{"type":"array"}')
    assert "uniqueItems is not enforced" in body["warnings"][0]


def test_generate_passes_the_constraint_on(serve: Serve):
    served = serve(say_all("aa"))
    reply = served.client.post("/generate", json={"text": "hi", "sampling_params": {"regex": "^a+$"}})

    grammar = served.engine.next_request().grammar
    assert reply.status_code == 200 and grammar is not None and grammar.spec is not None
    assert (grammar.spec.kind, grammar.spec.text) == (GrammarKind.REGEX, "a+")


def test_max_tokens_below_the_shortest_answer_is_refused(answering: Served):
    long = {"type": "array", "items": {"const": "xyzxyz"}, "minItems": 30}
    completion = answering.client.post("/v1/completions", json={"prompt": "hi", "guided_json": long}).json()[
        "error"
    ]
    sampling = {"json_schema": long, "max_new_tokens": 4}
    native = answering.client.post("/generate", json={"text": "hi", "sampling_params": sampling}).json()[
        "error"
    ]

    assert (completion["code"], completion["param"]) == ("max_tokens_too_small", "max_tokens")
    assert (native["code"], native["param"]) == ("max_tokens_too_small", "sampling_params.max_new_tokens")
