"""`POST /v1/grammar/check`, and constraints on their way through completions and `/generate`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.grammar.backend import GrammarError
from engine.grammar.compile.worker import CompileResult
from engine.runtime.config.engine_config import EngineConfig
from engine.runtime.errors import RequestError
from engine.runtime.grammar_use import GrammarKind, GrammarUse
from engine.tokenizer_manager.http.endpoints.grammar_check import (
    GrammarCheckBody,
    GrammarCheckRequest,
    checked_grammar,
    report,
)

from ...conftest import Serve, Served
from ...fake_engine import TOKENIZER, say_all

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


def reported(measure: Any) -> GrammarCheckBody:
    config = EngineConfig()
    checked = checked_grammar(GrammarCheckRequest(guided_json=SCHEMA), config, [])
    return asyncio.run(report(checked, TOKENIZER, measure))


def test_the_time_to_compile_and_the_forced_share_are_those_of_a_compilation():
    async def measure(use: GrammarUse) -> list[CompileResult]:
        assert use.spec is not None
        return [CompileResult(compile_s=0.0125, forced_share=0.4)]

    body = reported(measure)
    assert (body.ok, body.compile_ms, body.forced_share) == (True, 12.5, 0.4)


def test_what_the_compiler_refuses_is_not_ok():
    async def measure(use: GrammarUse) -> list[CompileResult]:
        raise GrammarError("too large", "schema_too_complex")

    body = reported(measure)
    assert not body.ok and body.error is not None and body.compile_ms is None
    assert (body.error.code, body.error.param, body.error.message) == (
        "schema_too_complex",
        "guided_json",
        "too large",
    )
    assert body.num_keywords > 0, "the keywords are explained too"


def test_what_cannot_be_compiled_now_is_a_warning():
    async def measure(use: GrammarUse) -> list[CompileResult]:
        raise RequestError("64 grammars wait", code="queue_full", status=429)

    body = reported(measure)
    assert body.ok and body.compile_ms is None
    assert body.warnings[-1] == "it was not compiled: 64 grammars wait"
