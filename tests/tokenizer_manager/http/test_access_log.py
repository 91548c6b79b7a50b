"""`--log-requests`: one line for each finished request, with its tokens and times, and no text of it."""

from __future__ import annotations

import json
import logging
import re

import pytest

from engine.runtime.logs import JsonFormatter, TerminalFormatter
from engine.runtime.messages import Finish, FinishKind
from engine.tokenizer_manager.http.access_log import _GENERATION, _LESS, _LESS_OF_ERRORS, AccessLog

from ..conftest import Serve
from ..fake_engine import WAIT_S, row, say_all

LINE = re.compile(
    r"request id=(?P<id>\S+) endpoint=(?P<endpoint>\S+) status=(?P<status>\d+) prompt=(?P<prompt>\d+) "
    r"cached=(?P<cached>\d+) output=(?P<output>\d+) ttft_ms=(?P<ttft_ms>\d+) rate_tok_s=(?P<rate_tok_s>\S+) "
    r"duration_ms=\d+ finish=(?P<finish>\S+) request_id=(?P<request_id>\S+)"
)
CHAT = {"messages": [{"role": "user", "content": "zq secret"}]}
CASES = [
    ("/v1/completions", {"prompt": "zq secret"}, "cmpl-"),
    ("/v1/completions", {"prompt": ["zq", "secret"], "n": 2}, "cmpl-"),
    ("/v1/completions", {"prompt": "zq secret", "stream": True}, "cmpl-"),
    ("/v1/chat/completions", CHAT, "chatcmpl-"),
    ("/v1/chat/completions", CHAT | {"stream": True}, "chatcmpl-"),
    ("/v1/responses", {"input": "zq secret"}, "resp"),
    ("/v1/messages", CHAT | {"model": "org/tiny", "max_tokens": 9}, "msg"),
    ("/api/chat", CHAT | {"model": "org/tiny"}, ""),
    ("/generate", {"text": "zq secret"}, ""),
]


@pytest.fixture
def records(caplog):
    """The records of the log, in JSON as `--log-format json` writes them, too."""
    caplog.set_level(logging.INFO, "engine.tokenizer_manager.http.access_log")

    def of_log():
        return [record for record in caplog.records if record.name == AccessLog.__module__]

    return of_log


@pytest.mark.parametrize(("path", "body", "prefix"), CASES)
def test_each_endpoint_has_one_line_with_its_figures(serve: Serve, records, path, body, prefix):
    served = serve(say_all("lo", " you"), log_requests=True)
    answer = served.client.post(path, json=body, headers={"X-Request-Id": "of-a-proxy"})
    assert answer.status_code == 200, answer.text
    served.client.get("/health")  # handled after the line was written
    (record,) = records()
    found = LINE.fullmatch(record.getMessage())
    assert found, record.getMessage()
    num = len(body["prompt"]) * body["n"] if isinstance(body.get("prompt"), list) else 1
    assert found["id"].startswith(prefix)
    assert (found["endpoint"], found["status"], found["finish"]) == (path, "200", "stop")
    assert found["request_id"] == "of-a-proxy"
    assert int(found["prompt"]) > 0
    assert int(found["output"]) > 0
    assert int(found["output"]) % num == 0
    fields = json.loads(JsonFormatter("x").format(record))
    assert fields["output"] == int(found["output"])
    assert fields["endpoint"] == path
    assert "secret" not in json.dumps(fields)
    assert "less" not in fields
    line = TerminalFormatter("tokenizer_manager").format(record)
    assert len(line) <= 110
    names = ("id", "prompt", "output", "ttft_ms", "finish")
    assert [name for name in names if f" {name}=" not in line] == []


@pytest.mark.parametrize("status", [200, 500])
def test_a_line_with_the_largest_figures_fits_a_terminal(status):
    ids = "chatcmpl-" + "a1b2c3d4" * 4, "01234567-89ab-4cde-8f01-23456789abcd"
    figures = (
        1_000_000,
        999_999,
        131_072,
        9_999_999,
        12345.6,
        9_999_999,
        "length,stop" if status == 200 else "error",
        ids[1],
    )
    arguments = (ids[0], "/v1/chat/completions", status, *figures)
    made = logging.LogRecord("x", logging.INFO, "f", 1, _GENERATION, arguments, None)
    made.less = _LESS if status == 200 else _LESS_OF_ERRORS
    line = TerminalFormatter("tokenizer_manager").format(made)
    assert len(line) <= 110 and "…" not in line
    kept = {"id": "chatcmpl-a1b2c3d4", "prompt": "1000000", "output": "131072", "ttft_ms": "9999999"}
    assert re.search(" ".join(f"{name}={value}" for name, value in kept.items()).replace(" ", ".* "), line)
    assert ("status=500" in line) is (status == 500)


def test_a_refused_request_has_a_line_without_tokens(serve: Serve, records):
    served = serve(say_all("x"), log_requests=True)
    assert served.client.post("/v1/completions", json={"prompt": ""}).status_code == 400
    served.client.get("/health")  # handled after the line was written
    (record,) = records()
    assert re.fullmatch(
        r"request id=\w+ endpoint=/v1/completions status=400 duration_ms=\d+", record.getMessage()
    )


def test_probes_have_no_line_and_it_is_off_by_default(serve: Serve, records):
    served = serve(say_all("x"), log_requests=True)
    for path in ("/health", "/metrics", "/v1/models", "/docs"):
        assert served.client.get(path).status_code == 200
    served.client.get("/health")  # handled after the line was written
    quiet = serve(say_all("x"))
    assert quiet.client.post("/v1/completions", json={"prompt": "hel"}).status_code == 200
    quiet.client.get("/health")
    assert records() == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "hel", "n": 0}, "n"),
        ("/v1/chat/completions", {"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role"),
        ("/v1/nothing", {}, None),
    ],
)
def test_the_fields_of_a_failure_are_values_and_not_their_json(serve: Serve, caplog, path, body, param):
    caplog.set_level(logging.INFO, "engine.tokenizer_manager.http.app")
    served = serve(say_all("x"))
    assert served.client.post(path, json=body).status_code >= 400
    (record,) = (each for each in caplog.records if each.getMessage().startswith("request failed"))
    fields = json.loads(JsonFormatter("x").format(record))
    assert (fields["path"], fields["param"]) == (path, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [({"mine": 1}, "None"), ({"stream": True, "stream_options": {"mine": 1}}, "stream_options")],
)
def test_the_name_of_an_unknown_field_is_not_logged(serve: Serve, caplog, body, param):
    caplog.set_level(logging.INFO, "engine.tokenizer_manager.http.app")
    reply = serve(say_all("x"), strict=True).client.post("/v1/completions", json={"prompt": "hi"} | body)
    (record,) = (each for each in caplog.records if each.getMessage().startswith("request failed"))
    assert reply.json()["error"]["param"].endswith("mine")
    assert "mine" not in record.getMessage() and record.getMessage().endswith(f" param={param}")


@pytest.mark.parametrize(
    ("path", "shown"),
    [("a%20status=200", '"/v1/a status=200"'), ("a%0Ab", r'"/v1/a\nb"'), ("%C3%A9", '"/v1/é"')],
)
def test_a_path_that_could_look_like_other_fields_is_quoted(serve: Serve, caplog, path, shown):
    caplog.set_level(logging.INFO, "engine.tokenizer_manager.http.app")
    serve(say_all("x")).client.get(f"/v1/{path}")
    (record,) = (each for each in caplog.records if each.getMessage().startswith("request failed"))
    assert f"path={shown} status=404" in record.getMessage()


def test_an_answer_whose_client_has_left_is_told(serve: Serve, records):
    served = serve(lambda request: [row(request, "a", total=1)], log_requests=True)
    with served.client.stream("POST", "/v1/completions", json={"prompt": "hel", "stream": True}) as reply:
        next(reply.iter_bytes())
    served.engine.next_abort()
    while not records():  # until the request has ended
        served.client.get("/health")
    (record,) = records()
    found = LINE.fullmatch(record.getMessage())
    assert found, record.getMessage()
    assert (found["status"], found["output"], found["finish"]) == ("200", "1", "disconnect")


def test_an_answer_that_the_engine_did_not_end_is_told(serve: Serve, records):
    served = serve(log_requests=True)
    waiting = served.post_later("/v1/completions", json={"prompt": "hel"})
    request = served.engine.next_request()
    served.engine.say(row(request, "", token_ids=[], total=0, finish=Finish(FinishKind.ERROR, message="no")))
    assert waiting.result(WAIT_S).status_code == 500
    served.client.get("/health")  # handled after the line was written
    (record,) = records()
    assert " status=500 " in record.getMessage() and " finish=error " in record.getMessage()
