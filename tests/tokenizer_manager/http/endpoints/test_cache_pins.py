"""`POST /v1/cache/pins`: what reaches the scheduler, what comes back, and what is refused."""

from __future__ import annotations

from array import array

import pytest

from tests.tokenizer_manager.conftest import Serve, Served
from tests.tokenizer_manager.fake_engine import TOKENIZER, WAIT_S
from tests.tokenizer_manager.http.test_bad_input import check_alive, check_error

PATH = "/v1/cache/pins"
USER = {"role": "user", "content": "hi"}


def ids(data: bytes) -> list[int]:
    values = array("i")
    values.frombytes(data)
    return values.tolist()


def test_a_text_is_pinned_in_its_namespace(serve: Serve):
    served = serve()
    reply = served.client.post(PATH, json={"prompt": "abcd", "ttl": 60, "cache_salt": "s"})
    pin = served.engine.pins.get(timeout=WAIT_S)

    assert (reply.status_code, reply.json()) == (
        200,
        {"pinned_tokens": 2, "asked_tokens": 4, "reason": "half of it is not cached"},
    )
    assert (ids(pin.input_ids), pin.ttl_s, pin.extra_key) == (TOKENIZER.encode("abcd"), 60.0, "s")


def test_token_ids_and_the_end_of_a_pin(serve: Serve):
    served = serve()
    assert served.client.post(PATH, json={"prompt": [1, 2, 3], "ttl": 0}).status_code == 200
    pin = served.engine.pins.get(timeout=WAIT_S)
    assert (ids(pin.input_ids), pin.ttl_s, pin.extra_key) == ([1, 2, 3], 0.0, "")


def test_a_chat_is_pinned_up_to_where_the_next_message_begins(serve: Serve):
    served = serve()
    served.client.post(PATH, json={"messages": [USER], "ttl": 1.5})
    pinned = ids(served.engine.pins.get(timeout=WAIT_S).input_ids)

    rendered = served.client.post("/tokenize", json={"messages": [USER, USER]}).json()["tokens"]
    assert pinned == rendered[: len(pinned)]
    served.client.post(PATH, json={"messages": [USER], "ttl": 1.5, "add_generation_prompt": True})
    assert len(ids(served.engine.pins.get(timeout=WAIT_S).input_ids)) > len(pinned)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": "a"}, "ttl", "ttl is missing"),
        ({"prompt": "a", "ttl": None}, "ttl", "must be a number"),
        ({"prompt": "a", "ttl": "60"}, "ttl", "must be a number"),
        ({"prompt": "a", "ttl": -1}, "ttl", "ttl is -1, but it must lie in [0, 86400] seconds; 0 unpins"),
        ({"prompt": "a", "ttl": 86401}, "ttl", "ttl is 86401, but"),
        ({"prompt": "a", "ttl": 10**400}, "ttl", "out of range"),
        ({"ttl": 1}, "prompt", "send exactly one"),
        ({"ttl": 1, "prompt": "a", "messages": [USER]}, "prompt", "send exactly one"),
        ({"ttl": 1, "prompt": ""}, "prompt", "prompt is empty"),
        ({"ttl": 1, "prompt": {"a": 1}}, "prompt", "must be a string"),
        (
            {"ttl": 1, "prompt": ["a", "b"]},
            "prompt",
            "prompt has 2 prompts, but one prefix is pinned at a time",
        ),
        ({"ttl": 1, "prompt": [258]}, "prompt", "token id 258"),
        (
            {"ttl": 1, "prompt": [1] * 256},
            "prompt",
            "prompt has 256 tokens, but a prompt has at least 1 and at",
        ),
        ({"ttl": 1, "prompt": "x" * 100_000}, "prompt", "at least 8334 tokens"),
        ({"ttl": 1, "messages": []}, "messages", "messages is empty"),
        ({"ttl": 1, "messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        ({"ttl": 1, "prompt": "a", "cache_salt": 5}, "cache_salt", "must be a string"),
    ],
)
def test_bad_pins(answering: Served, fields, param, message):
    check_error(answering.client.post(PATH, json=fields), 400, param, message)
    assert answering.engine.pins.empty()
    check_alive(answering)


def test_unknown_fields_are_told(serve: Serve):
    reply = serve().client.post(PATH, json={"prompt": "a", "ttl": 1, "color": "red"})
    assert reply.json()["warnings"] == ["unknown field color was ignored"]
    strict = serve(strict=True).client.post(PATH, json={"prompt": "a", "ttl": 1, "color": "red"})
    check_error(strict, 400, "color", "--strict")


def test_another_model_is_a_404(serve: Serve):
    reply = serve().client.post(PATH, json={"prompt": "a", "ttl": 1, "model": "other"})
    check_error(reply, 404, "model", "not served here")
