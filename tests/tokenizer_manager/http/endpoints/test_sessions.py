"""`/open_session`, `/close_session`, `/v1/kv_hints`: what reaches the scheduler, what comes back, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.runtime.messages import HintAction, HintOutcome
from tests.tokenizer_manager.conftest import Serve, Served
from tests.tokenizer_manager.fake_engine import WAIT_S, say_all

OPEN, CLOSE, HINTS = "/open_session", "/close_session", "/v1/kv_hints"


def key_of(served: Served, headers: dict[str, str] | None = None, **fields: str) -> str:
    """The session of a turn."""
    served.client.post("/generate", json={"text": "hi"} | fields, headers=headers)
    return served.engine.next_request().session


def envelope(*actions: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"protocol_version": 1, "session_id": "s", "actions": list(actions)} | fields


def action(kind: str, name: str = "a", **payload: Any) -> dict[str, Any]:
    return {"action_id": name, "action_type": kind, "payload": payload}


def test_a_session_is_closed_by_the_key_of_its_turns(serve: Serve):
    served = serve(say_all("x"))
    served.engine.hint_outcome = HintOutcome.DEFERRED
    reply = served.client.post(CLOSE, json={"session_id": "s", "cache_salt": "c"})

    assert (reply.status_code, reply.json()) == (200, {"outcome": "deferred", "detail": "as the test says"})
    hint = served.engine.hints.get(timeout=WAIT_S)
    assert (hint.session, hint.action) == (key_of(served, session_id="s", cache_salt="c"), HintAction.CLOSE)


def test_another_api_key_closes_another_session(serve: Serve):
    served = serve(say_all("x"), api_key=("one", "two"))
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    for headers in (one, two):
        served.client.post(CLOSE, json={"session_id": "s"}, headers=headers)
    closed = [served.engine.hints.get(timeout=WAIT_S).session for _ in range(2)]
    assert closed[0] == key_of(served, one, session_id="s") != closed[1]


def test_a_session_is_opened_with_its_id_or_a_new_one(serve: Serve):
    served = serve(say_all("x"))
    body = {"capacity_of_str_len": 1000, "session_id": "s", "timeout": 60.0}
    assert served.client.post(OPEN, json=body).json() == "s"
    hint = served.engine.hints.get(timeout=WAIT_S)
    assert (hint.action, hint.session) == (HintAction.OPEN, key_of(served, session_id="s"))

    made = served.client.post(OPEN, json={"capacity_of_str_len": 1000}).json()
    assert served.engine.hints.get(timeout=WAIT_S).session == key_of(served, session_id=made)

    served.engine.hint_outcome = HintOutcome.REJECTED
    reply = served.client.post(OPEN, json={"session_id": "s"})
    assert reply.status_code == 400
    assert (
        reply.json()["error"]["message"]
        == 'session_id "s" as the test says; close it, or leave the field out'
    )


def test_hints_are_answered_one_by_one(serve: Serve):
    served = serve(say_all("x"))
    body = envelope(
        action("retain", "1", ttl_s=60),
        action("pin", "2", ttl_s=0.5),
        action("demote", "3"),
        action("release", "4"),
        action("share", "5"),
        action("prefetch", "6"),
        action("retain", "7"),
        action("pin", "8", ttl_s=True),
        action("pin", "9", ttl_s=86_401),
        action("demote", "10") | {"action_version": 2},
        action("expect", "11", return_s=30),
        action("expect", "12", ttl_s=30),
        message_id="m",
    )
    reply = served.client.post(HINTS, json=body).json()

    hints = [served.engine.hints.get(timeout=WAIT_S) for _ in range(5)]
    assert [(hint.action, hint.ttl_s) for hint in hints] == [
        (HintAction.RETAIN, 60.0),
        (HintAction.RETAIN, 0.5),
        (HintAction.DEMOTE, 0.0),
        (HintAction.CLOSE, 0.0),
        (HintAction.RETAIN, 60.0),
    ]
    assert {hint.session for hint in hints} == {key_of(served, session_id="s")}
    assert reply["message_id"] == "m"
    assert [each["action_id"] for each in reply["results"]] == [str(number) for number in range(1, 13)]
    assert [each["outcome"] for each in reply["results"]] == ["accepted"] * 4 + ["rejected"] * 6 + [
        "accepted",
        "rejected",
    ]
    details = [each["detail"] for each in reply["results"][4:]]
    assert details[0] == '"share" is not supported; release, demote, retain, pin, expect, prefetch are'
    assert details[1] == "the server has no tier to load from; start it with --kv-disk or --kv-store"
    assert details[7] == "payload.return_s is null, but it must be a number in (0, 86400] seconds"
    assert details[2] == "payload.ttl_s is null, but it must be a number in (0, 86400] seconds"
    assert "payload.ttl_s is 86401, but" in details[4]
    assert details[5] == "action_version is 2, but it must be 1"


def test_a_prompt_is_prefetched_from_a_tier_by_its_turn(serve: Serve):
    served = serve(say_all("x"), cache={"kv_disk": "folder"})
    hints = {"protocol_version": 1, "actions": [action("prefetch", "1"), action("expect", "2", return_s=9)]}
    results = results_of(served.client.post("/v1/completions", json={"prompt": "hi", "kv_hints": hints}))
    assert results[0] == {
        "action_id": "1",
        "outcome": "accepted",
        "detail": "this prompt is looked up in the disk before it is computed",
    }
    assert results[1]["outcome"] == "deferred"
    assert served.engine.next_request().keep_s == 18.0

    [result] = served.client.post(HINTS, json=envelope(action("prefetch"))).json()["results"]
    assert (
        result["outcome"] == "rejected" and "send the prompt with prewarm or max_tokens 0" in result["detail"]
    )
    assert served.engine.hints.empty()


def test_a_header_names_the_session_of_hints(serve: Serve):
    served = serve(say_all("x"))
    headers = {"x-claude-code-session-id": "s"}
    body = envelope(action("release"))
    del body["session_id"]
    assert served.client.post(HINTS, json=body, headers=headers).status_code == 200
    assert served.engine.hints.get(timeout=WAIT_S).session == key_of(served, session_id="s")


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CLOSE, {}, "session_id is missing"),
        (CLOSE, {"session_id": None}, "session_id is null, but it must be a string"),
        (CLOSE, {"session_id": ""}, "session_id is empty"),
        (
            CLOSE,
            {"session_id": "s" * 257},
            "session_id has 257 characters, the limit is 256; send a hash of it",
        ),
        (OPEN, {"session_id": 5}, "session_id is 5, but it must be a string"),
        (OPEN, {"timeout": 0}, "timeout is 0, but it must lie in (0, 86400] seconds"),
        (OPEN, {"streaming": True}, "streaming is true, but it is not supported yet"),
        (HINTS, {"session_id": "s", "actions": []}, "protocol_version is missing"),
        (HINTS, {"session_id": "s", "protocol_version": 1}, "actions is missing"),
        (HINTS, envelope(protocol_version=2), "protocol_version is 2, but it must be 1"),
        (HINTS, envelope(protocol_version="1"), "it must be an integer"),
        (HINTS, envelope(session_id=None), "session_id is missing; name the session as its turns do"),
        (HINTS, envelope(*[action("release")] * 65), "actions has 65 actions, the limit is 64"),
        (HINTS, envelope({"action_type": "release"}), "actions[0].action_id is missing"),
        (HINTS, envelope(action("release"), {"action_id": "b"}), "actions[1].action_type is missing"),
        (HINTS, envelope({"action_id": 5, "action_type": "pin"}), "actions[0].action_id is 5"),
        (HINTS, envelope(action("pin") | {"payload": [1]}), "actions[0].payload is [1]"),
        (HINTS, {"protocol_version": 1, "session_id": "s", "actions": {}}, "actions is {}"),
        (HINTS, {"protocol_version": 1, "session_id": "s", "actions": ["release"]}, "actions[0] is"),
    ],
)
def test_a_malformed_body_is_refused_by_its_path(serve: Serve, path, body, message):
    served = serve(say_all("x"))
    reply = served.client.post(path, json=body)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]
    assert served.engine.hints.empty()


def test_sessions_are_listed_for_an_admin(serve: Serve):
    served = serve(say_all("x"), api_key=("one",), admin_api_key="boss")
    one, boss = ({"Authorization": f"Bearer {key}"} for key in ("one", "boss"))
    assert served.client.get("/v1/sessions", headers=one).status_code == 403
    assert served.client.get("/v1/sessions", headers=boss).json() == {
        "object": "list",
        "total": 7,
        "data": [
            {
                "session": "3f2a99c0d1e2f3a4",
                "turns": 12,
                "conversations": 2,
                "cached_tokens": 640,
                "idle_s": 1.5,
            }
        ],
    }


def results_of(reply: Any) -> list[dict[str, str]]:
    assert reply.status_code == 200, reply.text
    results: list[dict[str, str]] = json.loads(reply.headers["x-kv-hints"])
    return results


TURNS = [
    ("/generate", {"text": "hi"}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}),
]


@pytest.mark.parametrize(("path", "body"), TURNS)
def test_a_turn_has_hints_for_its_prompt_and_for_its_session(serve: Serve, path: str, body: dict[str, Any]):
    served = serve(say_all("x"))
    hints = envelope(action("retain", "1", ttl_s=60), action("release", "2"), action("share", "é"))
    session = hints.pop("session_id")

    results = results_of(served.client.post(path, json=body | {"kv_hints": hints, "session_id": session}))

    assert [each["outcome"] for each in results] == ["deferred", "accepted", "rejected"]
    assert results[0]["detail"] == "once it is computed, this prompt is kept for 60 s, within --pin-fraction"
    assert results[2]["action_id"] == "é"
    request = served.engine.next_request()
    assert request.keep_s == 60.0
    closed = served.engine.hints.get(timeout=WAIT_S)
    assert (closed.action, closed.session) == (HintAction.CLOSE, request.session)
    assert served.engine.hints.empty()


@pytest.mark.parametrize(
    ("actions", "fields", "keep_s"),
    [
        ([("release", {})], {}, 0.0),
        ([("demote", {})], {"session_id": "s"}, 0.0),
        ([("pin", {"ttl_s": 5}), ("demote", {})], {}, 5.0),
        ([("pin", {"ttl_s": 5})], {"stream": True}, 5.0),
        ([("pin", {"ttl_s": 0})], {}, None),
        ([("share", {})], {}, None),
        ([], {}, None),
    ],
)
def test_hints_for_a_prompt_ask_the_scheduler_nothing_more(serve: Serve, actions, fields, keep_s):
    served = serve(say_all("x"))
    hints = {"protocol_version": 1, "actions": [action(kind, **payload) for kind, payload in actions]}
    reply = served.client.post("/v1/completions", json={"prompt": "hi", "kv_hints": hints} | fields)
    assert reply.status_code == 200 and ("x-kv-hints" in reply.headers) == bool(actions)
    assert served.engine.next_request().keep_s == keep_s
    assert served.engine.hints.empty()


@pytest.mark.parametrize(
    ("hints", "param"),
    [
        ([], "kv_hints"),
        ({}, "kv_hints.protocol_version"),
        ({"protocol_version": 1}, "kv_hints.actions"),
        ({"protocol_version": 2, "actions": []}, "kv_hints.protocol_version"),
        ({"protocol_version": 1, "actions": [1]}, "kv_hints.actions[0]"),
        ({"protocol_version": 1, "actions": [{}]}, "kv_hints.actions[0].action_id"),
        ({"protocol_version": 1, "actions": [action("pin")] * 17}, "kv_hints.actions"),
        ({"protocol_version": 1, "actions": [action("pin", "x" * 257)]}, "kv_hints.actions[0].action_id"),
    ],
)
@pytest.mark.parametrize(("path", "body"), TURNS)
def test_a_malformed_envelope_of_a_turn_is_refused(
    answering: Served, path: str, body: dict[str, Any], hints, param
):
    reply = answering.client.post(path, json=body | {"kv_hints": hints})
    assert reply.status_code == 400
    assert param in reply.text
