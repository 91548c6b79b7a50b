"""Values that ask for nothing are accepted in every field of every request, at any depth: null, and the empty string or
list where the type has them."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import pytest

from engine.tokenizer_manager.http.app import App
from engine.tokenizer_manager.http.native.wire import NativeSampling
from engine.tokenizer_manager.http.ollama.wire import OllamaOptions
from engine.tokenizer_manager.http.reference.field_notes import OF_CLASSIFIERS, OF_EMBEDDERS
from engine.tokenizer_manager.http.routes import ROUTES
from engine.tokenizer_manager.http.schema.field_policy import (
    CHAT_NOT_YET,
    COMPLETION_NOT_YET,
    SAMPLING_NOT_YET,
)
from engine.tokenizer_manager.http.schema.generation_fields import StreamOptions

from ..fake_engine import CAPACITY, WAIT_S, FakeEngine, make_services, say_all
from .calling import call
from .pooling.test_classify import CLASSIFIER
from .pooling.test_embeddings import ANSWER, EMBEDDER
from .test_any_input import OF_LIVE, VALID, fim  # noqa: F401  (a fixture)

STRUCTS = {
    route.path: route.request
    for route in ROUTES
    if route.path in VALID.keys() - OF_LIVE and route.request is not None
}
NOT_EMPTY = {
    ("/v1/grammar/check", "guided_json"): "the check needs one constraint",
    ("/abort_request", "rid"): "it says what to abort",
}
"""Fields that say what the request is about. Without an allowed token (`allowed_token_ids`) there is no answer."""

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
RESPONSES, MESSAGES, OLLAMA = "/v1/responses", "/v1/messages", "/api/chat"
HI = {"role": "user", "content": "hi"}
FUNCTION: dict[str, Any] = {
    "name": "f",
    "description": "d",
    "parameters": {"type": "object"},
    "strict": False,
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = [HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "1"}


def said(kind: str) -> dict[str, Any]:
    """A message with one part."""
    return {"role": "user", "content": [{"type": kind, "text": "a"}]}


SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}}
TOOL = {"tools": [{"type": "function", "function": FUNCTION}]}
CHOICE = {"tool_choice": {"type": "function", "function": {"name": "f"}}}
CUSTOM = {"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "text"}}}]}
ITEMS = [
    HI,
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "1"},
]
TEXT_SCHEMA = {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}}
PLACES: list[tuple[str, dict[str, Any], str, set[str]]] = [
    (CHAT, {"messages": [HI]}, "messages.0", {"role", "content"}),
    (CHAT, {"messages": [HI, {"role": "assistant"}, HI]}, "messages.1", {"role"}),
    (CHAT, {"messages": [said("text")]}, "messages.0.content.0", {"type", "text"}),
    (CHAT, {"messages": [*CALLED, RESULT]}, "messages.1.tool_calls.0", {"function"}),
    (CHAT, {"messages": [*CALLED, RESULT]}, "messages.1.tool_calls.0.function", {"name"}),
    (CHAT, {"messages": [*CALLED, RESULT]}, "messages.2", {"role", "content"}),
    (CHAT, {"response_format": {"type": "text"}}, "response_format", {"type"}),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format", {"type"}),
    (CHAT, SCHEMA, "response_format", {"type", "json_schema"}),
    (CHAT, SCHEMA, "response_format.json_schema", {"schema"}),
    (CHAT, {"structured_outputs": {"json": {}}}, "structured_outputs", {"json"}),
    (CHAT, {"stream": True, "stream_options": {}}, "stream_options", set()),
    (CHAT, {"stream_options": {}}, "stream_options", set()),
    (CHAT, {"thinking": {"type": "enabled"}}, "thinking", {"type"}),
    (CHAT, {"thinking": {}}, "thinking", set()),
    (CHAT, {"reasoning": {}}, "reasoning", set()),
    (CHAT, TOOL, "tools.0", {"type", "function"}),
    (CHAT, TOOL, "tools.0.function", {"name"}),
    (CHAT, CUSTOM, "tools.0.custom", {"name"}),
    (CHAT, CUSTOM, "tools.0.custom.format", {"type"}),
    (CHAT, TOOL | CHOICE, "tool_choice", {"type", "function"}),
    (CHAT, TOOL | CHOICE, "tool_choice.function", {"name"}),
    (GENERATE, {"sampling_params": {}}, "sampling_params", set()),
    (RESPONSES, {"input": [HI]}, "input.0", {"role", "content"}),
    (RESPONSES, {"input": [said("input_text")]}, "input.0.content.0", {"type", "text"}),
    (RESPONSES, {"input": ITEMS}, "input.1", {"type", "call_id", "name", "arguments"}),
    (RESPONSES, {"input": [HI, {"type": "reasoning", "content": []}, HI]}, "input.1", {"type"}),
    (RESPONSES, {"text": {"format": {"type": "text"}}}, "text", set()),
    (RESPONSES, {"text": {"format": {"type": "text"}}}, "text.format", {"type"}),
    (RESPONSES, TEXT_SCHEMA, "text.format", {"type", "schema"}),
    (RESPONSES, {"reasoning": {}}, "reasoning", set()),
    (RESPONSES, {"tools": [{"type": "function", **FUNCTION}]}, "tools.0", {"type", "name"}),
    (MESSAGES, {"messages": [said("text")]}, "messages.0", {"role", "content"}),
    (MESSAGES, {"messages": [said("text")]}, "messages.0.content.0", {"type", "text"}),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": {}}]}, "tools.0", {"name", "input_schema"}),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 2}}, "thinking", {"type", "budget_tokens"}),
    (MESSAGES, {"output_config": {}}, "output_config", set()),
    (OLLAMA, {"messages": [HI]}, "messages.0", {"role", "content"}),
    (OLLAMA, {"options": {}}, "options", set()),
    (OLLAMA, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.function", {"name"}),
]
"""Endpoint, a body, the path of an object in it, and the members that the object must have."""
MEMBERS = sorted(
    {
        *(
            "type",
            "name",
            "schema",
            "strict",
            "description",
            "json_schema",
            "parameters",
            "format",
            "function",
            "custom",
        ),
        *(
            "role",
            "content",
            "refusal",
            "annotations",
            "audio",
            "tool_calls",
            "tool_call_id",
            "function_call",
            "id",
        ),
        *(
            "reasoning_content",
            "reasoning",
            "arguments",
            "input",
            "text",
            "cache_control",
            "citations",
            "status",
        ),
        *(
            "json",
            "regex",
            "choice",
            "grammar",
            "json_object",
            "structural_tag",
            "whitespace_pattern",
            "call_id",
        ),
        *(
            "disable_any_whitespace",
            "disable_additional_properties",
            "disable_fallback",
            "effort",
            "max_tokens",
        ),
        *(
            "budget_tokens",
            "display",
            "summary",
            "generate_summary",
            "verbosity",
            "thinking",
            "images",
            "tool_name",
        ),
        *StreamOptions.__struct_fields__,
        *OllamaOptions.__struct_fields__,
        *NativeSampling.__struct_fields__,
        *SAMPLING_NOT_YET,
    }
)
"""Every name that some object inside a request may have; in another one it is unknown, which is a warning."""


class Apps(NamedTuple):
    """The applications of a model that generates text, an embedder and a classifier."""

    generator: App
    embedder: App
    classifier: App


@pytest.fixture(scope="module")
def app() -> Iterator[Apps]:
    capacity = msgspec.structs.replace(CAPACITY, max_model_len=4096, num_pages=2048)
    generator = make_services(FakeEngine(say_all("x")), capacity=capacity)
    embedder = make_services(FakeEngine(ANSWER), capacity=capacity, pooling=EMBEDDER)
    classifier = make_services(FakeEngine(ANSWER), capacity=capacity, pooling=CLASSIFIER)
    yield Apps(App(generator), App(embedder), App(classifier))
    classifier.close()
    generator.close()
    embedder.close()


def answer(apps: Apps, path: str, body: dict[str, Any]) -> tuple[int, str]:
    pooling = apps.classifier if path in OF_CLASSIFIERS else apps.embedder
    app = pooling if path in OF_EMBEDDERS | OF_CLASSIFIERS else apps.generator

    async def run() -> tuple[int, str]:
        reply = await asyncio.wait_for(call(app, path, body), WAIT_S)
        return reply.status, reply.body.decode()

    return asyncio.run(run())


def check_accepted(app: Apps, path: str, body: dict[str, Any]) -> None:
    status, text = answer(app, path, body)
    wants = {200} if path != "/start_profile" else {200, 409}
    assert status in wants, (json.dumps(body), text)


def fields_with_empty_values() -> Iterator[Any]:
    for path, struct in STRUCTS.items():
        if "lora_adapter" in path:  # the application has no adapters to load
            continue
        for field in msgspec.structs.fields(struct):
            if field.required or (path, field.name) in NOT_EMPTY or field.name == "allowed_token_ids":
                continue
            empty: list[Any] = [None]
            kinds = _kinds(msgspec.inspect.type_info(field.type))
            empty += [""] if msgspec.inspect.StrType in kinds else []
            empty += [[]] if msgspec.inspect.ListType in kinds else []
            if field.name in VALID[path]:  # what the request is about: null alone, if it has another form
                continue
            for value in empty:
                yield pytest.param(
                    path, {field.encode_name: value}, id=f"{path}-{field.encode_name}-{value!r}"
                )


def _kinds(info: Any) -> set[type]:
    if isinstance(info, msgspec.inspect.Metadata):
        return _kinds(info.type)
    if isinstance(info, msgspec.inspect.UnionType):
        return set().union(*(_kinds(each) for each in info.types))
    return {type(info)}


@pytest.mark.fast_cases(120)
@pytest.mark.parametrize(("path", "fields"), list(fields_with_empty_values()))
def test_in_every_field_of_every_request(app: Apps, path: str, fields: dict[str, Any]):
    check_accepted(app, path, VALID[path] | fields)


@pytest.mark.parametrize(
    ("path", "names"),
    [(CHAT, CHAT_NOT_YET), (COMPLETIONS, COMPLETION_NOT_YET), (RESPONSES, SAMPLING_NOT_YET)],
)
@pytest.mark.parametrize("value", [None, "", []])
def test_in_every_field_that_is_not_supported_yet(app: Apps, path: str, names: Any, value: Any):
    check_accepted(app, path, VALID[path] | dict.fromkeys(names, value))


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize(("path", "body", "at", "needed"), PLACES)
def test_in_every_member_of_an_object_inside(
    app: Apps, path: str, body: dict[str, Any], at: str, needed: set[str]
):
    for name in MEMBERS:
        if name in needed:
            continue
        made = copy.deepcopy(VALID[path] | body)
        place: Any = made
        for step in at.split("."):
            place = place[int(step)] if isinstance(place, list) else place[step]
        place[name] = None
        check_accepted(app, path, made)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"response_format": {"type": "text", "json_schema": None}}),
        (CHAT, {"prediction": {"type": "content", "content": "hello"}}),  # cannot change the answer
        (
            CHAT,
            {"functions": [], "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto"},
        ),
        (CHAT, {"guided_choice": [], "regex": "", "json_schema": {}}),
        (CHAT, {"structured_outputs": {"choice": [], "regex": "", "json": None}}),
        (CHAT, {"stream_options": {"include_usage": False}}),
        (CHAT, {"model": ""}),
        (GENERATE, {"input_ids": []}),
        (GENERATE, {"text": "", "input_ids": [5]}),
        (RESPONSES, {"reasoning": {"effort": ""}}),
        (MESSAGES, {"output_config": {"effort": ""}}),
    ],
)
def test_what_real_clients_send(app: Apps, path: str, fields: dict[str, Any]):
    check_accepted(app, path, VALID[path] | fields)


def test_the_table_has_every_endpoint_that_reads_a_body():
    assert {CHAT, COMPLETIONS, GENERATE, RESPONSES, MESSAGES, OLLAMA} <= STRUCTS.keys()
