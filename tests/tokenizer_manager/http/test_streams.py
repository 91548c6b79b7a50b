"""What happens to streams when something goes wrong: never a clean end that is none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.runtime.messages import Finish, FinishKind

from ..conftest import Serve, Served
from ..fake_engine import LENGTH, WAIT_S, row

COMPLETIONS = "/v1/completions"
ERROR = Finish(FinishKind.ERROR, message="NaN in the logits", status=500)


def finish_all(served: Served, *args: Any) -> None:
    assert served.engine.loop is not None
    served.engine.loop.call_soon_threadsafe(*args)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token_has_its_status(serve: Serve, stream: bool):
    served = serve()
    reply = served.post_later(COMPLETIONS, json={"prompt": "hi", "stream": stream})
    served.engine.say(row(served.engine.next_request(), "", finish=ERROR))

    assert reply.result(WAIT_S).status_code == 500
    assert reply.result().json() == {
        "error": {
            "message": "NaN in the logits",
            "type": "server_error",
            "param": None,
            "code": "generation_failed",
        }
    }


def test_a_failure_in_a_stream_is_an_error_event_and_no_done(serve: Serve):
    served = serve()
    reply = served.post_later(COMPLETIONS, json={"prompt": "hi", "stream": True})
    request = served.engine.next_request()
    served.engine.say(row(request, "some"))
    served.engine.say(row(request, "", finish=ERROR))
    text = reply.result(WAIT_S).text

    assert text.count("data: ") == 2
    assert "[DONE]" not in text
    kind, data, *rest = text.split("\n\n")[1].split("\n")
    assert (kind, rest) == ("event: error", [])
    assert json.loads(data.removeprefix("data: "))["error"]["message"] == "NaN in the logits"


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_engine_is_told_to_everyone(serve: Serve, stream: bool):
    served = serve()
    reply = served.post_later(COMPLETIONS, json={"prompt": "hi", "stream": stream})
    served.engine.say(row(served.engine.next_request(), "some"))
    finish_all(served, served.services.manager.engine_died, "the scheduler died (SIGKILL)")
    result = reply.result(WAIT_S)

    if stream and result.status_code == 200:
        assert "[DONE]" not in result.text
        assert "event: error\n" in result.text
    else:
        assert result.status_code == 503
    assert "the scheduler died (SIGKILL)" in result.text
    for path in ("/health", "/health_generate"):
        assert served.client.get(path).status_code == 503
    after = served.client.post(COMPLETIONS, json={"prompt": "hi"})
    assert (after.status_code, after.json()["error"]["code"]) == (503, "engine_dead")


def test_draining_answers_503_and_lets_streams_finish(serve: Serve):
    served = serve()
    reply = served.post_later(COMPLETIONS, json={"prompt": "hi", "stream": True})
    request = served.engine.next_request()
    served.engine.say(row(request, "some"))
    finish_all(served, served.services.manager.drain)

    assert served.client.get("/health").json()["error"]["message"] == "unhealthy: the server is shutting down"
    assert served.client.post(COMPLETIONS, json={"prompt": "hi"}).status_code == 503
    served.engine.say(row(request, " text", finish=LENGTH))
    assert reply.result(WAIT_S).text.endswith("data: [DONE]\n\n")


def test_the_end_of_draining_is_an_error_event(serve: Serve):
    served = serve()
    reply = served.post_later(COMPLETIONS, json={"prompt": "hi", "stream": True})
    request = served.engine.next_request()
    served.engine.say(row(request, "some"))
    served.engine.say(row(request, " more"))
    finish_all(served, served.services.manager.abort_all, "the server stopped")

    text = reply.result(WAIT_S).text
    assert "the server stopped" in text
    assert "[DONE]" not in text
    assert served.engine.next_abort().rid == request.rid


def test_a_bug_in_a_handler_is_a_500_without_details(serve: Serve):
    served = serve()
    served.services.manager.engine.report = "nonsense"  # type: ignore[assignment]
    reply = served.client.get("/server_info", headers={"X-Request-Id": "r-1"})

    assert reply.status_code == 500
    assert reply.json()["error"]["message"].endswith("request id r-1")
    assert served.client.get("/v1/models").status_code == 200


def test_rows_that_wait_for_a_slow_reader_arrive_in_order(serve: Serve):
    """All rows are there before the handler runs again; it sends them in one go."""
    served = serve(
        lambda request: (row(request, str(i % 10), finish=LENGTH if i == 999 else None) for i in range(1000))
    )
    text = served.client.post(COMPLETIONS, json={"prompt": "hi", "stream": True}).text
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]

    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "0123456789" * 100


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/generate", {"text": "hi"}),
    ],
)
def test_an_answer_says_how_many_requests_were_before_it(serve: Serve, path, body, stream):
    served = serve()
    first = served.post_later(path, json=body)
    before = served.engine.next_request()
    second = served.post_later(path, json=body | {"stream": stream})
    for request in (served.engine.next_request(), before):
        served.engine.say(row(request, "x", finish=LENGTH))
    assert second.result(WAIT_S).headers["x-engine-queue-position"] == "1"
    assert first.result(WAIT_S).headers["x-engine-queue-position"] == "0"
