"""Bad input over a real connection: a status, an error that names the field, and a server that goes on as before.

What each field may hold is tested beside the code; here are one of each kind, and what only a real connection shows.
"""

from __future__ import annotations

import contextlib
import json
import socket

import httpx
import pytest

from .model import MAX_MODEL_LEN
from .serving import DEADLINE_S

pytestmark = pytest.mark.real_process

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"messages": [{"role": "user", "content": "x"}]}
PROMPT = {"prompt": "x"}

BAD_FIELDS = [
    (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt"),
    (COMPLETIONS, {}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ["x", ""]}, 400, "prompt[1]"),
    (COMPLETIONS, {"prompt": {"text": "x"}}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [5, "x"]}, 400, "prompt[1]"),
    (COMPLETIONS, {"prompt": [5, 10**6]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [5, -1]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [5, 2**70]}, 400, "prompt[1]"),
    (COMPLETIONS, {"prompt": "word " * 5000}, 400, "prompt"),
    (COMPLETIONS, PROMPT | {"max_tokens": 0}, 400, "max_tokens"),
    (COMPLETIONS, PROMPT | {"max_tokens": -5}, 400, "max_tokens"),
    (COMPLETIONS, PROMPT | {"max_tokens": MAX_MODEL_LEN}, 400, "max_tokens"),
    (COMPLETIONS, PROMPT | {"max_tokens": 10**30}, 400, "max_tokens"),
    (COMPLETIONS, PROMPT | {"max_tokens": "5"}, 400, "max_tokens"),
    (COMPLETIONS, PROMPT | {"max_tokens": 5.5}, 400, "max_tokens"),
    (COMPLETIONS, PROMPT | {"max_tokens": True}, 400, "max_tokens"),
    (COMPLETIONS, PROMPT | {"temperature": -0.1}, 400, "temperature"),
    (COMPLETIONS, PROMPT | {"temperature": "hot"}, 400, "temperature"),
    (COMPLETIONS, PROMPT | {"top_p": -0.1}, 400, "top_p"),
    (COMPLETIONS, PROMPT | {"top_k": -2}, 400, "top_k"),
    (COMPLETIONS, PROMPT | {"min_p": 2}, 400, "min_p"),
    (COMPLETIONS, PROMPT | {"presence_penalty": 3}, 400, "presence_penalty"),
    (COMPLETIONS, PROMPT | {"repetition_penalty": 0}, 400, "repetition_penalty"),
    (COMPLETIONS, PROMPT | {"seed": 2**64}, 400, "seed"),
    (COMPLETIONS, PROMPT | {"seed": 2**64}, 400, "seed"),
    (COMPLETIONS, PROMPT | {"n": 0}, 400, "n"),
    (COMPLETIONS, PROMPT | {"n": 100000}, 400, "n"),
    (COMPLETIONS, PROMPT | {"logprobs": 99}, 400, "logprobs"),
    (COMPLETIONS, PROMPT | {"logit_bias": {"x": 1}}, 400, "logit_bias"),
    (COMPLETIONS, PROMPT | {"logit_bias": {"99999": 1}}, 400, "logit_bias"),
    (COMPLETIONS, PROMPT | {"stop": [""]}, 400, "stop"),
    (COMPLETIONS, PROMPT | {"stop": 5}, 400, "stop"),
    (COMPLETIONS, PROMPT | {"stream_options": {"include_usage": True}}, 400, "stream_options"),
    (COMPLETIONS, PROMPT | {"model": "gpt-5"}, 404, "model"),
    (COMPLETIONS, PROMPT | {"suffix": "end"}, 400, "suffix"),
    (CHAT, {}, 400, "messages"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": "x"}, 400, "messages"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": "unspeakable"}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "word " * 5000}]}, 400, "messages"),
    (CHAT, USER | {"max_completion_tokens": 0}, 400, "max_completion_tokens"),
    (CHAT, USER | {"top_logprobs": 3}, 400, "top_logprobs"),
    (CHAT, USER | {"tools": [{"type": "function"}]}, 400, "tools[0].name"),
    (CHAT, USER | {"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema"),
    (CHAT, USER | {"model": None, "stream": "yes"}, 400, "stream"),
    (
        "/generate",
        {"text": "x", "sampling_params": {"max_new_tokens": 0}},
        400,
        "sampling_params.max_new_tokens",
    ),
    ("/generate", {"sampling_params": {}}, 400, "text"),
    ("/generate", {"input_ids": [10**6]}, 400, "input_ids"),
    ("/tokenize", {}, 400, "prompt"),
    ("/detokenize", {"tokens": [10**6]}, 400, "tokens"),
    ("/abort_request", {}, 400, "rid"),
]

BAD_BODIES = [
    (b"", None, "invalid_json"),
    (b"{", None, "invalid_json"),
    (b"[]", None, "invalid_json"),
    (b"null", None, "invalid_json"),
    (b'{"prompt": "\xff\xfe"}', None, "invalid_json"),
    (b'{"prompt": "\xed\xa0\x80"}', None, "invalid_json"),
    (b'{"prompt": "\\ud800"}', "prompt", None),
    (b'{"prompt": "x", "temperature": NaN}', "temperature", None),
    (b'{"prompt": "x", "temperature": -Infinity}', "temperature", None),
    (b'{"prompt": "x", "temperature": 1e999}', "temperature", None),
    (b'{"prompt": "x", "prompt": "y"}', "prompt", None),
    (b'{"prompt": ' + b"[" * 100000 + b"]" * 100000 + b"}", None, "invalid_json"),
    (b'{"prompt": "x", "seed": ' + b"9" * 10000 + b"}", None, "invalid_json"),
]


@pytest.fixture
def http(serve):
    """A connection, and the check that follows each refusal: a normal request works, and nothing is held."""
    with httpx.Client(base_url=serve.url, timeout=DEADLINE_S) as http:
        yield http
        answer = http.post(COMPLETIONS, json=PROMPT | {"max_tokens": 2})
        assert answer.status_code == 200
    assert serve.process.poll() is None


@pytest.fixture(scope="module", autouse=True)
def nothing_is_held_after_all(serve):
    yield
    serve.idle_metrics()


def error_of(response, status=400):
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() >= {"message", "type", "param", "code"}
    assert "Traceback" not in body["error"]["message"]
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.fast_cases(14)
@pytest.mark.parametrize(
    ("path", "body", "status", "param"), BAD_FIELDS, ids=lambda value: str(value)[:40].replace("/", "")
)
def test_a_bad_field_is_named(http, path, body, status, param):
    assert error_of(http.post(path, json=body), status)["param"] == param


@pytest.mark.parametrize(("body", "param", "code"), BAD_BODIES, ids=lambda value: str(value)[:40])
def test_a_bad_body_is_refused(http, body, param, code):
    error = error_of(http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"}))
    assert error["param"] == param
    assert code is None or error["code"] == code


def test_an_unknown_field_is_told_in_the_answer(http):
    answer = http.post(COMPLETIONS, json=PROMPT | {"max_tokens": 1, "wibble": 1})
    assert answer.json()["warnings"] == ["unknown field wibble was ignored"]


def test_a_stream_is_refused_with_a_status_and_not_with_an_event(http):
    body = PROMPT | {"stream": True, "max_tokens": MAX_MODEL_LEN}
    assert error_of(http.post(COMPLETIONS, json=body))["code"] == "context_length_exceeded"


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "chunked"])
def test_a_body_of_50_mb_is_refused(http, serve, declared):
    """Refused before it has arrived. A client that goes on sending may find the connection closed instead."""
    size = 50 << 20
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    host, port = serve.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
        if declared:
            connection.sendall(f"{head}Content-Length: {size}\r\n\r\n".encode())
        else:
            connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
            part = b"x" * (1 << 20)
            with contextlib.suppress(ConnectionError):  # it has hung up; what it said can still be read
                for _ in range(size >> 20):
                    connection.sendall(b"%x\r\n%b\r\n" % (len(part), part))
        answer = b""
        while b"\r\n\r\n" not in answer or b"}}" not in answer:
            received = connection.recv(65536)
            assert received, answer
            answer += received
    status, _, body = answer.partition(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 413 ")
    assert json.loads(body)["error"]["code"] == "request_too_large"


def test_what_is_no_http_is_hung_up_on(http, serve):
    host, port = serve.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 this is TLS\r\n\r\n")
        answer = b""
        while received := connection.recv(65536):
            answer += received
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")


@pytest.mark.slow
def test_a_key_guards_everything_but_health(start_serve, model):
    keys = ("--api-key", "s3cret", "--api-key", "s3cond", "--admin-api-key", "s3admin")
    engine = start_serve(str(model), *keys).wait_until_ready()
    with httpx.Client(base_url=engine.url, timeout=DEADLINE_S) as http:
        for path in ("/v1/models", "//v1/models", "/metrics", "/server_info", "/openapi.json", "/nothing"):
            error_of(http.get(path), 401)
        error_of(http.get("/v1/models", headers={b"authorization": b"Bearer s3cre\xff"}), 401)
        error_of(http.post("/flush_cache"), 401)
        assert http.get("/health").status_code == 200
        for key in ("s3cret", "s3cond", "s3admin"):
            headers = {"authorization": f"Bearer {key}"}
            assert http.get("/v1/models", headers=headers).status_code == 200
            flushed = http.post("/flush_cache", headers=headers)
            assert flushed.status_code == (200 if key == "s3admin" else 403)
    assert engine.stop() == 0
    assert not any(key in engine.log for key in ("s3cret", "s3cond", "s3admin"))
