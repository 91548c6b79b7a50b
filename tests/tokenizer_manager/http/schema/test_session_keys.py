"""The session of a request: which field or header names it, over every generating API, and whose session it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.tokenizer_manager.conftest import Serve, Served
from tests.tokenizer_manager.fake_engine import say_all

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
UUID = "0199a213-81c0-7800-8aa1-bbab2a035a53"
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": HI, "max_tokens": 4},
    "/generate": {"text": "hi"},
    "/api/chat": {"messages": HI, "stream": False},
}


def session(served: Served, path: str, headers: dict[str, str] | None = None, **fields: Any) -> str:
    reply = served.client.post(path, json=BODIES[path] | fields, headers=headers)
    assert reply.status_code == 200, reply.text
    assert "warnings" not in reply.json()
    return served.engine.next_request().session


@pytest.mark.parametrize(
    ("path", "fields", "headers"),
    [
        (CHAT, {"session_id": UUID}, {}),
        ("/v1/completions", {"session_id": UUID}, {}),
        (RESPONSES, {"session_id": UUID}, {}),
        (MESSAGES, {"session_id": UUID}, {}),
        ("/generate", {"session_id": UUID}, {}),
        ("/generate", {"session_params": {"id": UUID, "rid": None, "offset": None, "replace": False}}, {}),
        # Claude Code, in two forms of its metadata and in a header
        (MESSAGES, {"metadata": {"user_id": f"user_1_account__session_{UUID}"}}, {}),
        (MESSAGES, {"metadata": {"user_id": json.dumps({"device_id": "d", "session_id": UUID})}}, {}),
        (MESSAGES, {}, {"X-Claude-Code-Session-Id": UUID}),
        # Codex
        (RESPONSES, {"prompt_cache_key": UUID, "client_metadata": {"x": "y"}}, {}),
        (RESPONSES, {"prompt_cache_key": "of the app"}, {"session_id": UUID}),
        (RESPONSES, {}, {"session-id": UUID}),
        # opencode
        (CHAT, {"prompt_cache_key": "of the app"}, {"x-session-affinity": UUID}),
        (CHAT, {}, {"x-session-id": UUID, "x-session-affinity": "other"}),
        ("/api/chat", {}, {"x-session-id": UUID}),
    ],
)
def test_each_api_names_the_same_session(serve: Serve, path, fields, headers):
    served = serve(say_all("x"))
    expected = session(served, CHAT, prompt_cache_key=UUID)
    assert len(expected) == 16 and UUID[:8] not in expected
    assert session(served, path, headers, **fields) == expected
    assert session(served, path, headers, **fields) == expected


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *((path, {}) for path in BODIES),
        (CHAT, {"session_id": "", "prompt_cache_key": None}),
        (MESSAGES, {"metadata": {"user_id": "ada"}}),
        (MESSAGES, {"metadata": {"user_id": '{"session_id":7}'}}),
        ("/generate", {"session_params": {"id": None}}),
        ("/generate", {"session_params": {}}),
    ],
)
def test_a_request_without_a_key_has_no_session(serve: Serve, path, fields):
    assert session(serve(say_all("x")), path, **fields) == ""


def test_a_body_comes_before_a_header_and_a_header_before_the_cache_key(serve: Serve):
    served = serve(say_all("x"))
    named = [session(served, CHAT, prompt_cache_key=name) for name in ("a", "b", "c")]
    headers = {"x-session-id": "b"}
    assert session(served, CHAT, headers, prompt_cache_key="c", session_id="a") == named[0]
    assert session(served, CHAT, headers, prompt_cache_key="c") == named[1]
    assert len(set(named)) == 3


def test_salts_and_api_keys_have_sessions_of_their_own(serve: Serve):
    served = serve(say_all("x"), api_key=("one", "two"))

    def of(key: str, **fields: str) -> str:
        return session(served, CHAT, {"Authorization": f"Bearer {key}"}, session_id="s", **fields)

    assert len({of("one"), of("two"), of("one", cache_salt="x"), of("two", cache_salt="x")}) == 4
    assert of("one") == of("one", user="ada")


LONG = "s" * 257


@pytest.mark.parametrize(
    ("path", "fields", "headers", "param"),
    [
        (CHAT, {"session_id": LONG}, {}, "session_id"),
        (CHAT, {"prompt_cache_key": LONG}, {}, "prompt_cache_key"),
        (CHAT, {}, {"x-session-affinity": LONG}, "x-session-affinity"),
        (MESSAGES, {"metadata": {"user_id": json.dumps({"session_id": LONG})}}, {}, "metadata.user_id"),
        ("/generate", {"session_params": {"id": LONG}}, {}, "session_params.id"),
    ],
)
def test_a_long_key_is_refused_with_its_length_and_the_way_out(serve: Serve, path, fields, headers, param):
    reply = serve(say_all("x")).client.post(path, json=BODIES[path] | fields, headers=headers)
    assert reply.status_code == 400
    assert f"{param} has 257 characters, the limit is 256; send a hash of it" in reply.text


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"session_id": 7}, "session_id"),
        (RESPONSES, {"prompt_cache_key": ["a"]}, "prompt_cache_key"),
        ("/generate", {"session_params": "a"}, "session_params"),
        ("/generate", {"session_params": {"id": "a", "rid": "r"}}, "session_params.rid"),
        ("/generate", {"session_params": {"id": "a", "offset": 5}}, "session_params.offset"),
        ("/generate", {"session_params": {"id": "a", "offset": 0}}, "session_params.offset"),
        ("/generate", {"session_params": {"id": "a", "replace": True}}, "session_params.replace"),
        (
            "/generate",
            {"session_params": {"id": "a", "drop_previous_output": True}},
            "session_params.drop_previous_output",
        ),
    ],
)
def test_other_types_and_turns_with_only_the_new_part_are_refused(serve: Serve, path, fields, param):
    reply = serve(say_all("x")).client.post(path, json=BODIES[path] | fields)
    assert reply.status_code == 400
    assert f"{param} is " in reply.text


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", RESPONSES])
def test_a_retention_in_memory_forbids_the_disk(serve: Serve, path):
    served = serve(say_all("x"))
    found = {}
    for value in ("in_memory", "in-memory", "24h", "", None):
        assert (
            served.client.post(path, json=BODIES[path] | {"prompt_cache_retention": value}).status_code == 200
        )
        found[value] = served.engine.next_request().in_memory
    assert found == {"in_memory": True, "in-memory": True, "24h": False, "": False, None: False}
    reply = served.client.post(path, json=BODIES[path] | {"prompt_cache_retention": "48h"})
    assert reply.status_code == 400
    assert (
        reply.json()["error"]["message"]
        == 'prompt_cache_retention is "48h", but it must be one of 24h, in_memory, in-memory'
    )
