from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from ...conftest import Serve, Served
from ...fake_engine import LENGTH, MODEL, WAIT_S, row, say_all
from ..answers import sse
from ..serving import CALL, FAILED, PARAMETERS, ROOMY
from .test_reading import CODING_AGENT

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "f", "parameters": PARAMETERS}


ClientOf = Callable[..., openai.OpenAI]


@pytest.fixture
def client_of() -> Iterator[ClientOf]:
    """Makes clients that are closed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def make(served: Served) -> openai.OpenAI:
            client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)
            return stack.enter_context(client)

        yield make


def test_an_answer_in_one_piece(serve: Serve, client_of: ClientOf):
    client = client_of(serve(say_all("Hel", "lo", cached=4)))
    answer = client.responses.create(model=MODEL, input="hi", instructions="be brief", metadata={"a": "b"})

    assert answer.id.startswith("resp_")
    assert answer.output_text == "Hello"
    assert (answer.status, answer.model, answer.object) == ("completed", MODEL, "response")
    assert (answer.instructions, answer.metadata) == ("be brief", {"a": "b"})
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens == 4
    assert answer.usage.output_tokens == 5
    assert answer.usage.total_tokens == answer.usage.input_tokens + 5


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_kept_and_computed_without_an_answer(serve: Serve, client_of: ClientOf, stream: bool):
    served = serve(say_all("never seen"), capacity=ROOMY)
    options = {"ttl": "12h", "prewarm": True}
    body: Any = {"model": MODEL, "input": "hi " * 100, "extra_body": {"prompt_cache_options": options}}
    if stream:
        with client_of(served).responses.create(**body, stream=True) as events:
            answer = list(events)[-1].response
    else:
        answer = client_of(served).responses.create(**body)
    request = served.engine.next_request()

    assert (request.keep_s, request.sampling.max_new_tokens) == (43_200.0, 1)
    assert (answer.status, answer.output, answer.usage.output_tokens) == ("completed", [], 0)
    page_size = ROOMY.page_size
    written = len(request.input_ids) // 4 // page_size * page_size
    assert answer.usage.input_tokens_details.cache_write_tokens == written > 0


def test_options_of_the_cache_that_do_not_exist_are_refused(serve: Serve):
    served = serve(say_all("x"))
    for options in ({"ttl": "1h"}, {"mode": "none"}, {"prewarm": 1}, "12h"):
        reply = served.client.post(PATH, json={"input": "hi", "prompt_cache_options": options})
        assert reply.status_code == 400 and reply.json()["error"]["param"].startswith("prompt_cache_options")


def test_a_stream(serve: Serve, client_of: ClientOf):
    client = client_of(serve(say_all("Hel", "lo")))
    with client.responses.stream(model=MODEL, input="hi") as stream:
        events = list(stream)
        final = stream.get_final_response()

    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert final.output_text == "Hello"


def test_a_call(serve: Serve, client_of: ClientOf):
    served = serve(say_all(CALL[:20], CALL[20:]), capacity=ROOMY)
    with client_of(served).responses.stream(model=MODEL, input="hi", tools=[TOOL]) as stream:  # type: ignore[list-item]
        final = stream.get_final_response()

    [call] = final.output
    assert (call.type, call.name, call.arguments) == ("function_call", "f", '{"a": 1}')  # type: ignore[union-attr]
    assert final.status == "completed"


def test_a_call_in_a_namespace(serve: Serve, client_of: ClientOf):
    call = CALL.replace('"f"', '"crm__f"')
    served = serve(say_all(call[:20], call[20:]), capacity=ROOMY)
    namespace = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [TOOL]}
    with client_of(served).responses.stream(model=MODEL, input="hi", tools=[namespace]) as stream:  # type: ignore[list-item]
        events = list(stream)
        final = stream.get_final_response()

    [item] = final.output
    assert (item.type, item.name, item.namespace) == ("function_call", "f", "crm")  # type: ignore[union-attr]
    [added] = [event for event in events if event.type == "response.output_item.added"]
    assert (added.item.name, added.item.namespace) == ("f", "crm")  # type: ignore[union-attr]


def test_a_cut_answer(serve: Serve):
    served = serve(say_all("Hel", finish=LENGTH))
    whole = served.client.post(PATH, json={"input": "hi"}).json()
    events = sse(served.client.post(PATH, json={"input": "hi", "stream": True}).content)

    assert whole["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events[-1][0] == "response.incomplete"


def test_a_coding_agents_request_is_answered(serve: Serve):
    served = serve(say_all('{"response": "ok"}'), capacity=ROOMY)
    reply = served.client.post(PATH, json=CODING_AGENT | {"model": MODEL})
    events = sse(reply.content)

    assert reply.headers["content-type"].startswith("text/event-stream")
    assert events[-1][0] == "response.completed"
    assert events[-1][1]["response"]["output"][0]["content"][0]["text"] == "ok"
    assert "web_search" in events[0][1]["response"]["warnings"][0]
    assert served.engine.next_request().grammar is not None


def test_input_tokens_are_those_of_the_answer(serve: Serve):
    served = serve(say_all('{"response": "ok"}'), capacity=ROOMY)
    body = CODING_AGENT | {"model": MODEL, "stream": False}
    counted = served.client.post(f"{PATH}/input_tokens", json=body).json()

    assert counted["object"] == "response.input_tokens"
    assert counted["input_tokens"] == served.client.post(PATH, json=body).json()["usage"]["input_tokens"]


def test_errors_are_the_clients_exceptions(serve: Serve, client_of: ClientOf):
    client = client_of(serve(say_all("x")))

    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input="hi", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="hi")


def test_a_stream_that_fails_ends_with_the_failed_response(serve: Serve):
    served = serve(lambda request: [row(request, "some"), row(request, "", finish=FAILED)])
    events = sse(served.client.post(PATH, json={"input": "hi", "stream": True}).content)

    assert [name for name, _ in events[-2:]] == ["response.output_item.done", "response.failed"]
    assert events[-1][1]["response"]["error"] == {"code": "server_error", "message": "out of luck"}
    assert events[-1][1]["response"]["output"][0]["content"][0]["text"] == "some"


def test_closing_a_stream_aborts_it(serve: Serve, client_of: ClientOf):
    served = serve(lambda request: [row(request, "some")])
    stream = client_of(served).responses.create(model=MODEL, input="hi", stream=True)
    next(iter(stream))
    stream.close()

    assert served.engine.next_abort().rid == served.engine.next_request().rid


ASKED: Any = [{"role": "user", "content": "hi " * 100}]
ANSWERED: Any = [*ASKED, {"role": "assistant", "content": "x"}, {"role": "user", "content": "go on"}]
FUNCTIONS: Any = [{"type": "function", "name": "t", "parameters": {"type": "object"}}]
TURN: Any = {"instructions": "be brief", "tools": FUNCTIONS}


@pytest.mark.parametrize(
    ("cached", "turn", "expected"),
    [
        (10_000, {"input": ANSWERED}, "cache_hit"),
        (0, {"input": ANSWERED}, "unavailable"),
        (0, {"input": ANSWERED, "tools": []}, "tools_changed"),
        (16, {"input": ANSWERED, "instructions": "be long"}, "input_changed"),
        (16, {"input": ANSWERED[1:]}, "input_changed"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_compared_with_that_of_an_earlier_response(
    serve: Serve, cached: int, turn: Any, expected: str, stream: bool
):
    client = serve(say_all("x", cached=cached), capacity=ROOMY).client
    first = client.post("/v1/responses", json=TURN | {"input": ASKED}).json()
    assert "prompt_cache_diagnostics" not in first
    options = {"prompt_cache_options": {"comparison_response_id": first["id"]}}
    reply = client.post("/v1/responses", json=TURN | turn | options | {"stream": stream})
    if stream:
        body = json.loads(reply.text.strip().splitlines()[-1].removeprefix("data: "))["response"]
    else:
        body = reply.json()

    if expected in ("cache_hit", "unavailable"):
        assert body["prompt_cache_diagnostics"] == {"type": expected}
    else:
        missed = first["usage"]["input_tokens"] - cached
        assert body["prompt_cache_diagnostics"] == {
            "type": "cache_miss",
            "reason": expected,
            "cache_missed_tokens": missed,
        }


def test_responses_that_are_not_known_are_not_compared(serve: Serve):
    served = serve(say_all("x"), capacity=ROOMY, api_key=("a", "b"))

    def ask(key: str, **fields: Any) -> Any:
        headers = {"Authorization": f"Bearer {key}"}
        return served.client.post(
            "/v1/responses", json=TURN | {"input": ASKED} | fields, headers=headers
        ).json()

    hidden = ask("a", store=False)
    known = ask("a", store=False, prompt_cache_options={})
    for key, response_id in (("a", hidden["id"]), ("b", known["id"]), ("a", known["output"][0]["id"])):
        answer = ask(key, prompt_cache_options={"comparison_response_id": response_id})
        assert answer["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}
    compared = ask("a", prompt_cache_options={"comparison_response_id": known["id"]})
    assert compared["prompt_cache_diagnostics"]["type"] in ("cache_hit", "unavailable")
    wrong = ask("a", prompt_cache_options={"comparison_response_id": 5})
    assert wrong["error"]["message"].startswith("prompt_cache_options.comparison_response_id")
