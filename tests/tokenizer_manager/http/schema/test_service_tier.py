"""`service_tier` and `background_options`: which class a request is in, and what the answer says of it."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from tests.tokenizer_manager.conftest import Serve
from tests.tokenizer_manager.fake_engine import say_all

HI: Final = [{"role": "user", "content": "hi"}]
BODIES: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
}
FIELDS: Final[list[tuple[dict[str, Any], bool, str | None, float | None]]] = [
    ({}, False, None, None),
    ({"service_tier": None}, False, None, None),
    ({"service_tier": "auto"}, False, "default", None),
    ({"service_tier": "priority"}, False, "default", None),
    ({"service_tier": "flex"}, True, "flex", None),
    ({"service_tier": "flex", "timeout": 60}, True, "flex", 60.0),
    ({"background_options": {"completion_window": "2h"}}, True, "flex", 7200.0),
    ({"background_options": {"completion_window": "8h"}, "timeout": 60}, True, "flex", 60.0),
    ({"background_options": {}}, False, None, None),
]


@pytest.mark.parametrize("path", BODIES)
def test_the_answer_reports_the_tier_that_the_request_got(serve: Serve, path):
    served = serve(say_all("x"))
    for fields, background, tier, timeout_s in FIELDS:
        reply = served.client.post(path, json=BODIES[path] | fields)
        message = served.engine.next_request()
        assert reply.status_code == 200, reply.text
        assert (message.background, message.timeout_s) == (background, timeout_s), fields
        assert reply.json().get("service_tier") == tier and "warnings" not in reply.json()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_each_event_of_a_stream_reports_it(serve: Serve, path):
    served = serve(say_all("x"))
    reply = served.client.post(path, json=BODIES[path] | {"stream": True, "service_tier": "flex"})
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    assert events and {event["service_tier"] for event in events} == {"flex"}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"service_tier": "cheap"}, "service_tier", "one of auto, default, flex, priority, scale"),
        (
            {"background_options": {"completion_window": "1h"}},
            "background_options.completion_window",
            "one of 2h, 8h",
        ),
    ],
)
def test_other_values_are_refused_by_path(serve: Serve, path, fields, param, words):
    reply = serve().client.post(path, json=BODIES[path] | fields)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param and words in reply.json()["error"]["message"]
