"""Answers that match a schema, a grammar or a tool, from real servers: validity, equality, crashes and bad grammars."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import jsonschema_rs
import openai
import pytest
from pydantic import BaseModel, Field

from .conftest import StartServe
from .serving import DEADLINE_S, EngineServe

pytestmark = pytest.mark.real_process

MODEL: Final = "small-llama"
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
        "kind": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "age", "tags", "kind"],
    "additionalProperties": False,
}
TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 10}, "days": {"enum": [1, 2, 3]}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
]
BY_SCHEMA: Final = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


class Person(BaseModel):
    name: Annotated[str, Field(max_length=10)]
    age: Annotated[int, Field(ge=0, le=150)]


def matches(text: str, schema: dict[str, Any] = SCHEMA) -> bool:
    return bool(jsonschema_rs.validator_for(schema).is_valid(json.loads(text)))


def body(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"person {number}"}],
        "max_tokens": 120,
        "temperature": number % 3 / 2,
        "seed": number,
        "response_format": BY_SCHEMA,
    } | fields


def post(engine: EngineServe, path: str, fields: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{engine.url}{path}", json=fields, timeout=DEADLINE_S)


def contents(engine: EngineServe, bodies: list[dict[str, Any]]) -> list[str]:
    """The answers of requests that run at the same time."""

    def ask(fields: dict[str, Any]) -> str:
        response = post(engine, "/v1/chat/completions", fields)
        assert response.status_code == 200, response.text
        [choice] = response.json()["choices"]
        return str(choice["message"]["content"])

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(ask, bodies))


def test_every_answer_matches_its_schema(serve: EngineServe):
    answers = contents(serve, [body(n) for n in range(24)])

    assert all(map(matches, answers))
    assert len(set(answers)) > 12


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": "(yes|no), because [a-z]{2,9}"}, "(yes|no), because [a-z]{2,9}"),
        ({"guided_choice": ["red", "green"]}, "red|green"),
        ({"structured_outputs": {"choice": ["x", "yy"]}}, "x|yy"),
        ({"grammar": 'root ::= "a" [0-9]+ "z"'}, "a[0-9]+z"),
        ({"ebnf": 'start: "q" /[a-c]{3}/'}, "q[a-c]{3}"),
        ({"response_format": {"type": "json_object"}}, r"(?s)\{.*\}"),
    ],
)
def test_other_constraints_on_every_endpoint(serve: EngineServe, fields: dict[str, Any], pattern: str):
    import re

    chat = post(serve, "/v1/chat/completions", body(3, response_format=None) | fields)
    text = post(serve, "/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 60, **fields})
    native = post(serve, "/generate", {"text": "x", "sampling_params": {"max_new_tokens": 60, **fields}})

    for response in (chat, text, native):
        assert response.status_code == 200, response.text
    for answer, reason in (
        (chat.json()["choices"][0]["message"]["content"], chat.json()["choices"][0]["finish_reason"]),
        (text.json()["choices"][0]["text"], text.json()["choices"][0]["finish_reason"]),
        (native.json()["text"], native.json()["meta_info"]["finish_reason"]["type"]),
    ):
        assert reason in ("stop", "length")
        assert reason == "length" or re.fullmatch(pattern, answer), answer


def test_an_answer_that_is_cut_is_complete_json(serve: EngineServe):
    fields = {"response_format": {"type": "json_object"}, "temperature": 1.0}
    for text in contents(serve, [body(number, max_tokens=40 + 3 * number, **fields) for number in range(8)]):
        assert isinstance(json.loads(text), dict)


def test_streams_and_parallel_samples_are_the_same_answers(client: openai.OpenAI):
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "invent people"}],
        "max_tokens": 120,
        "seed": 5,
        "temperature": 1.0,
        "response_format": BY_SCHEMA,
        "n": 3,
    }
    whole = [choice.message.content for choice in client.chat.completions.create(**fields).choices]
    parts = ["", "", ""]
    for chunk in client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""

    assert parts == whole and len(set(whole)) > 1
    assert all(matches(text or "") for text in whole)


def test_the_parse_helper_of_the_client(client: openai.OpenAI):
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "invent a person"}],
        response_format=Person,
        max_tokens=200,
    )

    assert isinstance(answer.choices[0].message.parsed, Person)


def test_tools_are_called_and_their_results_read(client: openai.OpenAI):
    question: Any = {"role": "user", "content": "weather?"}
    fields: dict[str, Any] = {"model": MODEL, "tools": TOOLS, "max_tokens": 200, "seed": 3}
    answer = client.chat.completions.create(messages=[question], tool_choice="required", **fields).choices[0]
    assert answer.finish_reason in ("tool_calls", "length")
    calls = answer.message.tool_calls or []
    assert calls and answer.message.content is None
    assert matches(calls[0].function.arguments, TOOLS[0]["function"]["parameters"])  # type: ignore[index]

    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    one = client.chat.completions.create(messages=[question], tool_choice=named, **fields).choices[0]
    assert [call.function.name for call in one.message.tool_calls or []] == ["get_weather"]
    assert one.finish_reason == "tool_calls"

    with client.chat.completions.stream(messages=[question], tool_choice=named, **fields) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0].message.tool_calls or []
    assert [call.function.arguments for call in streamed] == [
        call.function.arguments for call in one.message.tool_calls or []
    ]

    result: Any = {"role": "tool", "tool_call_id": calls[0].id, "content": "sunny"}
    history: list[Any] = [question, answer.message.model_dump(exclude_none=True), result]
    after = client.chat.completions.create(messages=history, tool_choice="none", **fields).choices[0]
    assert after.message.tool_calls is None


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "code"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}},
            "invalid_schema",
        ),
        ({"regex": "(?=a)b"}, "invalid_regex"),
        ({"regex": "a", "guided_choice": ["a"]}, "conflicting_constraints"),
        ({"regex": "(([a-z]{1,100}){1,100}){1,100}x"}, "schema_too_complex"),
        ({"response_format": BY_SCHEMA, "max_tokens": 5}, "max_tokens_too_small"),
    ],
)
def test_a_bad_constraint_is_a_status_also_in_a_stream(
    serve: EngineServe, fields: dict[str, Any], code: str, stream: bool
):
    request = body(1, response_format=None) | fields | {"stream": stream}
    response = post(serve, "/v1/chat/completions", request)

    assert (response.status_code, response.json()["error"]["code"]) == (400, code), response.text


ARGUMENTS: Final = ("--dtype", "float32", "--page-size", "4", "--max-total-tokens", "1600")


@pytest.fixture(scope="module")
def expected(model: Path) -> Iterator[list[str]]:
    """The answers of a plain server, one request at a time."""
    with EngineServe(str(model), *ARGUMENTS, "--no-overlap", "--multi-step-ms", "0") as engine:
        engine.wait_until_ready()
        yield [contents(engine, [fields])[0] for fields in REQUESTS]


REQUESTS: Final = [body(n) for n in range(9)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("--overlap",),
        ("--no-overlap", "--speculative", "ngram"),
        ("--no-overlap", "--chaos", "retract=0.2:40", "--chunked-prefill-size", "16"),
    ],
    ids=["overlap", "drafts", "retraction"],
)
def test_the_same_answers_under_all_ways_to_run(
    start_serve: StartServe, model: Path, expected: list[str], arguments: tuple[str, ...]
):
    engine = start_serve(str(model), *ARGUMENTS, *arguments).wait_until_ready()

    assert contents(engine, REQUESTS) == expected
    assert engine.stop() == 0, engine.log
    assert engine.leftovers() == []


@pytest.mark.slow
def test_a_guided_stream_survives_the_loss_of_the_scheduler(
    start_serve: StartServe, model: Path, expected: list[str]
):
    engine = start_serve(str(model), *ARGUMENTS, "--chaos", "slow=0.02").wait_until_ready()
    text, is_killed = "", False
    with httpx.stream(
        "POST",
        f"{engine.url}/v1/chat/completions",
        json=REQUESTS[4] | {"stream": True},
        timeout=DEADLINE_S,
    ) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            [choice] = json.loads(line.removeprefix("data: "))["choices"]
            text += choice["delta"].get("content") or ""
            if len(text) > 10 and not is_killed:
                is_killed = True
                os.kill(engine.pids["scheduler"], signal.SIGKILL)

    assert is_killed and text == expected[4]
