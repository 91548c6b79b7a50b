"""`HttpBackend` against a scripted server on the loopback interface."""

from __future__ import annotations

import pytest

from engine.cli.chat.backend import HttpBackend
from engine.cli.chat.settings import ChatSettings
from engine.runtime.errors import EngineError, RequestError
from engine.runtime.messages import Usage

QUESTION = [{"role": "user", "content": "hi"}]


def connect(url, **options):
    return HttpBackend(url, form={}, **options)


def delta(text=None, finish=None, **more):
    return {
        "choices": [{"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}],
        **more,
    }


def answer(backend, settings=None):
    chunks = list(backend.answer(QUESTION, settings or ChatSettings()))
    return "".join(chunk.text for chunk in chunks), chunks


def test_the_first_model_is_taken_or_the_named_one(server):
    backend = connect(server.url)
    assert (backend.model, backend.max_context, backend.where) == ("first", 77, f"at {server.url}")
    backend.close()
    assert connect(f"{server.url}/v1/", model="second").max_context is None
    assert connect(server.url.removeprefix("http://")).model == "first"
    with pytest.raises(RequestError, match="has no model 'third'; it serves first, second"):
        connect(server.url, model="third")


def test_an_answer_is_streamed_with_its_usage(server):
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    server.stream(
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        ": a comment\n\n",
        delta("Grüße, "),
        delta("☃"),
        delta(finish="stop"),
        {"choices": [], "usage": usage},
    )
    text, chunks = answer(connect(server.url, api_key="k"), ChatSettings(seed=5, stop=("x",)))
    assert text == "Grüße, ☃"
    assert chunks[-1].usage == Usage(9, 2, 4)
    assert [c.finish_reason for c in chunks if c.finish_reason] == ["stop"]
    assert server.bodies == [
        {
            "model": "first",
            "messages": QUESTION,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "seed": 5,
            "stop": ["x"],
        }
    ]
    assert set(server.keys) == {"Bearer k"}


@pytest.mark.parametrize("details", [None, {}])
def test_a_server_that_tells_less_is_fine(server, details):
    server.stream(delta("a", finish="stop", usage={"prompt_tokens": 1, "prompt_tokens_details": details}))
    _text, chunks = answer(connect(server.url))
    assert chunks[-1].usage == Usage(1, 0, 0)


def test_a_refused_request_says_what_the_server_says(server):
    error = {"message": "too long", "param": "messages", "code": "context_length_exceeded"}
    server.say("/v1/chat/completions", {"error": error}, status=400)
    with pytest.raises(RequestError, match="^too long$") as raised:
        answer(connect(server.url))
    assert (raised.value.code, raised.value.param, raised.value.status) == (
        "context_length_exceeded",
        "messages",
        400,
    )


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_that_says_when_is_asked_again(server, monkeypatch, status):
    """As a server with a full queue, or with a grammar compiler that starts."""
    server.say("/v1/chat/completions", {"error": {"message": "5 wait"}}, status=status)
    pauses: list[float] = []
    monkeypatch.setattr("engine.cli.chat.backend.time.sleep", pauses.append)
    server.retry_after = "0"
    server.after(3, lambda: server.stream(delta("Hi", finish="stop")))
    lines: list[str] = []
    backend = connect(server.url)
    backend.on_wait = lines.append
    assert answer(backend)[0] == "Hi"
    assert len(server.bodies) == 4
    assert len(pauses) == 3 and min(pauses) > 0.1, "a server that says 0 is not asked without a pause"
    assert (
        len(lines) == 3
        and lines[0].startswith("waiting 0 s for the server: ")
        and lines[0].endswith("5 wait")
    )
    server.say("/v1/chat/completions", {"error": {"message": "5 wait"}}, status=status)
    server.retry_after = "3600"
    with pytest.raises(EngineError, match="5 wait"):
        answer(connect(server.url))
    assert len(server.bodies) == 5, "an hour is too long"


def test_the_banner_has_what_the_server_tells(server):
    assert connect(server.url).about() == ""
    server.say("/api/show", {"details": {"quantization_level": "Q4_K_M"}})
    server.replies["/"] = (200, b"<html>")
    assert connect(server.url).about() == f"Q4_K_M, page at {server.url}/"


def test_a_failing_server_is_no_mistake_of_the_user(server):
    server.say("/v1/chat/completions", {"error": {"message": "out of order"}}, status=503)
    with pytest.raises(EngineError, match="the server failed: out of order") as raised:
        answer(connect(server.url))
    assert not isinstance(raised.value, RequestError)
    server.replies["/v1/chat/completions"] = (502, b"<html>bad gateway</html>")
    with pytest.raises(EngineError, match="bad gateway"):
        answer(connect(server.url))


def test_an_error_event_in_the_stream_is_an_error(server):
    server.stream(delta("half"), 'event: error\ndata: {"error": {"message": "died"}}\n\n')
    with pytest.raises(EngineError, match="the server failed: died"):
        answer(connect(server.url))


def test_a_stream_that_breaks_off_is_an_error(server):
    server.stream(delta("half"), done=False)
    with pytest.raises(EngineError, match="broke off before the answer was complete"):
        answer(connect(server.url))
    server.stream("data: {not json\n\n")
    with pytest.raises(EngineError, match="an event that is not JSON"):
        answer(connect(server.url))


def test_tokens_are_counted_where_the_server_can(server):
    backend = connect(server.url)
    server.say("/tokenize", {"count": 12})
    assert backend.count_tokens(QUESTION) == 12
    assert server.bodies == [{"model": "first", "messages": QUESTION}]
    del server.replies["/tokenize"]
    assert backend.count_tokens(QUESTION) is None
    server.say("/tokenize", {"count": 12})
    assert backend.count_tokens(QUESTION) is None  # not asked again
    assert len(server.bodies) == 2


def test_a_missing_key_is_said(server):
    server.say("/v1/models", {"error": {"message": "no key"}}, status=401)
    with pytest.raises(EngineError, match="wants an API key; pass --api-key or set ENGINE_API_KEY"):
        connect(server.url)


def test_a_wrong_key_is_not_called_a_missing_one(server):
    server.say("/v1/models", {"error": {"message": "no key"}}, status=401)
    with pytest.raises(EngineError, match="does not know this API key; check --api-key or ENGINE_API_KEY"):
        connect(server.url, api_key="wrong")


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        (
            "http://127.0.0.1:9",
            EngineError,
            r"no server answers at http://127.0.0.1:9 \(Connection refused\); start one with `engine serve`",
        ),
        ("ftp://x", RequestError, "must look like http://127.0.0.1:30000"),
        ("http://", RequestError, "must look like"),
        ("http://127.0.0.1:port", RequestError, "which is no URL"),
    ],
)
def test_a_url_that_leads_nowhere(url, error, message):
    with pytest.raises(error, match=message):
        connect(url)


def test_a_server_of_another_kind_is_said(server):
    server.say("/v1/models", {"hello": "world"})
    with pytest.raises(EngineError, match="does not speak the OpenAI API; check --url"):
        connect(server.url)
    server.say("/v1/models", {"data": []})
    with pytest.raises(EngineError, match="serves no model"):
        connect(server.url)
