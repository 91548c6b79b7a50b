"""What clients get wrong: each is a 4xx with an OpenAI error object, and the server lives on."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

import pytest

from ..conftest import Serve, Served
from ..fake_engine import WAIT_S, say_all

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
USER = {"role": "user", "content": "hi"}


def check_error(reply: Any, status: int, param: str | None, message: str) -> None:
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert message in error["message"]
    assert isinstance(error["type"], str)
    assert error["code"] is not None


def check_alive(served: Served) -> None:
    assert served.engine.generate.empty()
    assert served.engine.aborts.empty()
    assert len(served.services.manager.request_log) == 0
    assert served.client.post(COMPLETIONS, json={"prompt": "hi"}).status_code == 200
    served.engine.next_request()


BOTH = [
    ({"max_tokens": 0}, "max_tokens", "max_tokens is 0, but it must be at least 1"),
    ({"max_tokens": -5}, "max_tokens", "max_tokens is -5"),
    ({"max_tokens": 1000}, "max_tokens", "the context holds 256"),
    ({"max_tokens": 2**63 - 1}, "max_tokens", "9223372036854775807"),
    ({"max_tokens": 2**70}, "max_tokens", "max_tokens is 1180591620717411303424"),
    ({"max_tokens": "5"}, "max_tokens", 'max_tokens is "5", but it must be an integer'),
    ({"max_tokens": 1.5}, "max_tokens", "must be an integer"),
    ({"max_tokens": True}, "max_tokens", "must be an integer"),
    ({"max_tokens": [5]}, "max_tokens", "must be an integer"),
    ({"min_tokens": -1}, "min_tokens", "must be 0 or more"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "must not exceed max_tokens (8)"),
    ({"temperature": -0.1}, "temperature", "temperature is -0.1, but it must lie in [0, 2]"),
    ({"temperature": 2.01}, "temperature", "temperature is 2.01, but it must lie in [0, 2]"),
    ({"temperature": "hot"}, "temperature", "must be a number"),
    ({"temperature": 10**400}, "temperature", "out of range"),
    ({"top_p": -0.1}, "top_p", "[0, 1]"),
    ({"top_p": 1.1}, "top_p", "[0, 1]"),
    ({"top_k": -2}, "top_k", "top_k is -2"),
    ({"min_p": 2}, "min_p", "[0, 1]"),
    ({"seed": 2**64}, "seed", "seed is"),
    ({"frequency_penalty": 3}, "frequency_penalty", "[-2, 2]"),
    ({"presence_penalty": -3}, "presence_penalty", "[-2, 2]"),
    ({"repetition_penalty": 0}, "repetition_penalty", "(0, 10]"),
    ({"logit_bias": {"abc": 1}}, "logit_bias", "keys must be token ids"),
    ({"logit_bias": {"999": 1}}, "logit_bias", "[0, 258)"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "[-100, 100]"),
    ({"logit_bias": {"5": "x"}}, "logit_bias", "must be a number"),
    ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias", "the limit is 1024"),
    ({"stop": [""]}, "stop", "empty string"),
    ({"stop": ["a", ""]}, "stop", "empty string"),
    ({"stop": ["a"] * 50_000}, "stop", "the limit is 64"),
    ({"stop": "x" * 5000}, "stop", "the limit is 1024"),
    ({"stop": [1]}, "stop[0]", "must be a string"),
    ({"stop_token_ids": [258]}, "stop_token_ids", "[0, 258)"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]", "must be an integer"),
    ({"n": 0}, "n", "n is 0"),
    ({"n": 10**6}, "n", "[1, 128]"),
    ({"n": 100}, "n", "prompts times n"),
    ({"stream": "yes"}, "stream", "true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream is not true"),
    (
        {"stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
        "true or false",
    ),
    ({"model": 5}, "model", "must be a string"),
    ({"priority": 2**63}, "priority", "priority is"),
    ({"priority": 1_000_001}, "priority", "it must lie in [-1000000, 1000000]; 0 is usual"),
    ({"priority": -1_000_001}, "priority", "priority is -1000001, but"),
    (
        {"priority": "urgent"},
        "priority",
        'priority is "urgent", but it must be an integer or one of "high" (20)',
    ),
    ({"priority": 1.5}, "priority", "priority is 1.5, but it must be an integer or a string"),
    ({"priority": True}, "priority", "must be an integer or a string"),
    ({"priority": [1]}, "priority", "must be an integer or a string"),
    (
        {"queue_timeout": 0},
        "queue_timeout",
        "queue_timeout is 0, but it must lie in (0, 86400] seconds; leave it",
    ),
    ({"queue_timeout": -1.5}, "queue_timeout", "queue_timeout is -1.5, but"),
    ({"queue_timeout": "5"}, "queue_timeout", "must be a number"),
    ({"timeout": 0.0}, "timeout", "timeout is 0, but"),
    ({"timeout": 86401}, "timeout", "timeout is 86401, but it must lie in (0, 86400] seconds"),
    ({"timeout": 10**400}, "timeout", "out of range"),
    ({"timeout": True}, "timeout", "must be a number"),
    ({"timeout": [5]}, "timeout", "must be a number"),
    ({"user": 5}, "user", "must be a string"),
    ({"cache_salt": 5}, "cache_salt", "must be a string"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "response_format.type"),
    ({"response_format": "json"}, "response_format", "must be an object"),
]

CHAT_ONLY = [
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a", "image_url": {"url": "x"}}]}
            ]
        },
        "messages[0].content[0].image_url",
        "not supported yet",
    ),
    ({"max_completion_tokens": 1000}, "max_completion_tokens", "and max_completion_tokens is 1000"),
    ({"messages": []}, "messages", "messages is empty"),
    ({"messages": None}, "messages", "must be a list"),
    ({"messages": "hi"}, "messages", "must be a list"),
    ({"messages": ["hi"]}, "messages[0]", "must be an object"),
    ({"messages": [USER] * 5000}, "messages", "the limit is 4096"),
    ({"messages": [USER, {"content": "hi"}]}, "messages[1].role", "is missing"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role", 'messages[0].role is "wizard"'),
    ({"messages": [{"role": 5, "content": "hi"}]}, "messages[0].role", "must be a string"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "must be a string or a list"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]", "must be an object"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        'is "image_url", but the engine serves only the text of this model; leave it out, or describe',
    ),
    ({"messages": [{"role": "user", "content": [{"txt": "a"}]}]}, "messages[0].content[0].type", "null"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        "is missing",
    ),
    ({"messages": [USER | {"tool_calls": [{}]}]}, "messages[0].tool_calls", "only messages of the assistant"),
    (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]},
        "messages[1].tool_calls[0].function",
        "is missing",
    ),
    ({"messages": [USER | {"name": 5}]}, "messages[0].name", "must be a string"),
    ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages", "the context holds 256"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "send one"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    ({"max_completion_tokens": 1000}, "max_completion_tokens", "the context holds"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs is not true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "[0, 20]"),
    ({"logprobs": 5}, "logprobs", "true or false"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "which the server sets"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "not supported yet"),
    (
        {"tools": [{"type": "function", "function": {"name": 5}}]},
        "tools[0].function.name",
        "must be a string",
    ),
    ({"tools": [{"type": 5}]}, "tools[0].type", "must be"),
    ({"tool_choice": "sometimes"}, "tool_choice", "none, auto, required"),
    ({"tool_choice": "required"}, "tool_choice", "tools"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "one of none"),
]

COMPLETIONS_ONLY = [
    ({"prompt": ""}, "prompt", "prompt is empty"),
    ({"prompt": []}, "prompt", "prompt is empty"),
    ({"prompt": None}, "prompt", "prompt is missing"),
    ({"prompt": 5}, "prompt", "prompt is 5, but it must be a string"),
    ({"prompt": {"a": 1}}, "prompt", "must be a string"),
    ({"prompt": ["a", 1]}, "prompt[1]", "must be a string"),
    ({"prompt": [1, "a"]}, "prompt[1]", "must be an integer"),
    ({"prompt": [1, 1.5]}, "prompt[1]", "must be an integer"),
    ({"prompt": [True]}, "prompt[0]", "must be an integer"),
    ({"prompt": [-1]}, "prompt", "token id -1"),
    ({"prompt": [2**40]}, "prompt", "token id 1099511627776"),
    ({"prompt": ["a", ""]}, "prompt[1]", "is empty"),
    ({"prompt": ["a"] * 3000}, "prompt", "the limit is 2048"),
    ({"prompt": "x" * 256}, "prompt", "the prompt has 256 tokens"),
    ({"prompt": "x" * 250}, "max_tokens", "lower max_tokens to 6"),
    ({"prompt": "x" * 100_000}, "prompt", "at least 8334 tokens"),
    ({"prompt": ["a", "x" * 256]}, "prompt[1]", "prompt[1] has 256 tokens"),
    ({"prompt": [[1], [258]]}, "prompt[1]", "token id 258"),
    ({"prompt": ["a"] * 2048, "n": 128}, "n", "262144 answers"),
    ({"suffix": "x"}, "suffix", "this model has no tokens for it (fim_prefix, fim_suffix, fim_middle)"),
    ({"best_of": 2, "n": 3}, "best_of", "best_of is 2, but n is 3"),
    ({"best_of": 0}, "best_of", "best_of is 0, but it must lie in [1, 128]"),
    ({"best_of": 129}, "best_of", "best_of is 129, but it must lie in [1, 128]"),
    ({"best_of": 100}, "best_of", "prompts times n or best_of"),
    ({"best_of": 3, "stream": True}, "best_of", "leave out stream or best_of"),
    ({"best_of": "3"}, "best_of", "must be an integer"),
    ({"best_of": 1.5}, "best_of", "must be an integer"),
    ({"logprobs": 21}, "logprobs", "[0, 20]"),
    ({"logprobs": True}, "logprobs", "must be an integer"),
    ({"echo": "yes"}, "echo", "true or false"),
]


@pytest.mark.fast_cases(40)
@pytest.mark.parametrize(("fields", "param", "message"), BOTH + CHAT_ONLY)
def test_chat(answering: Served, fields, param, message):
    for streaming in ({}, {"stream": True}) if "stream" not in json.dumps(fields) else ({},):
        check_error(answering.client.post(CHAT, json=HI | fields | streaming), 400, param, message)
    check_alive(answering)


@pytest.mark.fast_cases(40)
@pytest.mark.parametrize(("fields", "param", "message"), BOTH + COMPLETIONS_ONLY)
def test_completions(answering: Served, fields, param, message):
    check_error(answering.client.post(COMPLETIONS, json={"prompt": "hi"} | fields), 400, param, message)
    check_alive(answering)


@pytest.mark.fast_cases(40)
@pytest.mark.parametrize(
    "path", [CHAT, COMPLETIONS, "/generate", "/tokenize", "/detokenize", "/abort_request", "/v1/cache/pins"]
)
@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (b"", None, "it is empty"),
        (b"not json", None, "not valid JSON"),
        (b"[]", None, "must be an object"),
        (b'{"prompt": "\xff\xfe"}', None, "not UTF-8"),
        (b'{"prompt": "\\ud800"}', "prompt", "half of a surrogate pair"),
        (b'{"prompt": "a", "prompt": "b"}', "prompt", "twice"),
        (
            b'{"messages": [{}, {"role": "user", "content": "a", "content": "b"}]}',
            "messages[1].content",
            "twice",
        ),
        (b'{"temperature": NaN}', "temperature", "NaN"),
        (b'{"prompt": [1, NaN]}', "prompt[1]", "NaN"),
        (b'{"temperature": -Infinity}', "temperature", "Infinity"),
        (b'{"timeout": NaN}', "timeout", "NaN"),
        (b'{"ttl": NaN}', "ttl", "NaN"),
        (b'{"a":' * 50_000, None, "nested too deeply"),
    ],
)
def test_bodies_that_are_no_json_object(answering: Served, path, body, param, message):
    check_error(answering.client.post(path, content=body), 400, param, message)
    check_alive(answering)


def test_an_infinite_number_is_out_of_range(serve: Serve):
    reply = serve().client.post(COMPLETIONS, content=b'{"prompt": "a", "temperature": 1e999}')
    check_error(reply, 400, "temperature", "inf")
    for field in ("timeout", "queue_timeout"):
        body = b'{"prompt": "a", "' + field.encode() + b'": 1e999}'
        check_error(
            serve().client.post(COMPLETIONS, content=body), 400, field, f"{field} is inf, but it must"
        )


def test_an_unknown_model_is_a_404_that_names_the_one_there_is(serve: Serve):
    served = serve(say_all("x"))
    fields = HI | {"prompt": "hi"}
    for path in (CHAT, COMPLETIONS, "/tokenize"):
        reply = served.client.post(path, json=fields | {"model": "gpt-x"})
        check_error(reply, 404, "model", 'use "org/tiny"')
        assert reply.json()["error"]["code"] == "model_not_found"
    check_alive(served)


def test_a_template_that_refuses_is_told_with_its_reason(serve: Serve):
    served = serve(say_all("x"), chat_template="{{ raise_exception('only one message, please') }}")
    check_error(served.client.post(CHAT, json=HI), 400, "messages", "only one message, please")
    check_alive(served)


def test_a_model_without_a_template_points_to_completions(serve: Serve):
    served = serve(say_all("x"), chat_template=None)
    check_error(served.client.post(CHAT, json=HI), 400, "messages", "/v1/completions")
    check_alive(served)


def test_unknown_fields_are_refused_when_strict(serve: Serve):
    served = serve(say_all("x"), strict=True)
    check_error(served.client.post(CHAT, json=HI | {"temprature": 1}), 400, "temprature", "--strict")
    strange = {"messages": [USER | {"mood": 1}]}
    check_error(served.client.post(CHAT, json=strange), 400, "messages[0].mood", "--strict")
    stream = {"stream": True, "stream_options": {"include_usge": True}}
    for path, prompt in ((CHAT, HI), (COMPLETIONS, {"prompt": "hi"})):
        reply = served.client.post(path, json=prompt | stream)
        check_error(reply, 400, "stream_options.include_usge", "--strict")
    part = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "size": 1}]}]}
    check_error(served.client.post(CHAT, json=part), 400, "messages[0].content[0].size", "--strict")
    sampling = {"text": "hi", "sampling_params": {"temprature": 1}}
    check_error(served.client.post("/generate", json=sampling), 400, "sampling_params.temprature", "--strict")
    check_alive(served)


def test_a_body_over_the_limit_is_refused_before_it_is_read(serve: Serve):
    served = serve(say_all("x"), max_body_mb=0.5)
    reply = served.client.post(COMPLETIONS, content=b" " * (512 * 1024 + 1))
    check_error(reply, 413, None, "larger than 524288 bytes")
    check_alive(served)


def raw(served: Served, request: bytes) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=WAIT_S)
    connection.sendall(request)
    return connection


def test_50_mb_in_chunks_are_refused_as_soon_as_the_limit_is_passed(serve: Serve):
    """Without a Content-Length; the answer must come although the client has not finished."""
    served = serve(say_all("x"), max_body_mb=0.25)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with raw(served, head) as connection:
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        for _ in range(5):  # 320 KiB, and never the last chunk
            connection.sendall(chunk)
        answer = connection.recv(65536)
        for _ in range(795):  # 50 MB in all; the server throws them away
            connection.sendall(chunk)
        connection.sendall(b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")
    check_alive(served)


def test_a_declared_50_mb_body_is_refused_without_a_byte_of_it(serve: Serve):
    served = serve(say_all("x"))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 52428800\r\n\r\n"
    with raw(served, head) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")
    check_alive(served)


def test_a_client_that_goes_away_while_it_sends_costs_nothing(serve: Serve):
    served = serve(say_all("x"))
    raw(
        served, b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"prompt"'
    ).close()
    check_alive(served)


def test_malformed_http_is_a_400(serve: Serve):
    served = serve(say_all("x"))
    with raw(served, b"NONSENSE\r\n\r\n") as connection:
        assert re.match(rb"HTTP/1.1 400 ", connection.recv(65536))
    check_alive(served)


def test_unknown_paths_and_methods(serve: Serve):
    served = serve()
    client = served.client
    check_error(client.get("/v1/nothing"), 404, None, "/v1/nothing")
    check_error(client.get(f"{served.url}//health"), 404, None, "//health")
    check_error(client.get(CHAT), 405, None, "use POST")
    check_error(client.delete("/health"), 405, None, "use GET")
    assert client.get(CHAT).headers["allow"] == "POST"
    assert client.delete("/health").headers["allow"] == "GET, HEAD"
    assert client.head("/health").status_code == 200


def test_a_full_queue_is_a_429_with_retry_after(serve: Serve):
    served = serve(max_queued_requests=1)
    waiting = [served.post_later(COMPLETIONS, json={"prompt": "hi", "n": 3}) for _ in range(3)]
    for _ in range(9):
        served.engine.next_request()
    reply = served.client.post(COMPLETIONS, json={"prompt": "hi"})

    check_error(reply, 429, None, "9 requests wait, the limit is 1")
    assert reply.json()["error"]["type"] == "rate_limit_error"
    assert int(reply.headers["retry-after"]) >= 1
    assert reply.headers["x-engine-queue-position"] == "9"
    served.engine.loop.call_soon_threadsafe(served.services.manager.engine_died, "over")  # type: ignore[union-attr]
    assert [one.result(WAIT_S).status_code for one in waiting] == [503] * 3


def test_names_that_clients_chose_come_back_short(serve: Serve):
    served = serve(say_all("x"))
    long_names = {"prompt": "hi"} | {f"{i}{'x' * 10_000}": 1 for i in range(100)}
    warnings = served.client.post(COMPLETIONS, json=long_names).json()["warnings"]
    assert len(warnings) == 17
    assert warnings[-1] == "and 84 warnings more"
    assert max(map(len, warnings)) < 200
    many = {"messages": [{"role": "user", "content": "a", "b": 1}] * 20}
    assert len(served.client.post(CHAT, json=many).json()["warnings"]) == 17
    deep = b'{"prompt": ' + b'{"a long name": ' * 60 + b'"\\ud800"' + b"}" * 61
    for body in (b'{"' + b"x" * 10**6 + b'": NaN}', deep):
        error = served.client.post(COMPLETIONS, content=body).json()["error"]
        assert len(error["param"]) <= 201
        assert len(error["message"]) <= 2001


def test_a_body_nested_up_to_the_parsers_limit_is_an_answer_or_a_400(serve: Serve):
    served = serve(say_all("x"))
    for depth in range(860, 1000, 20):
        body = b'{"prompt": "x", "metadata": ' + b"[" * depth + b'"\\ud83d\\ude00"' + b"]" * depth + b"}"
        assert served.client.post(COMPLETIONS, content=body).status_code in (200, 400)
