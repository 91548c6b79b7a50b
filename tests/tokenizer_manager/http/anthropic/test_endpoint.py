from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest

from engine.runtime.messages import Finish, FinishKind

from ...conftest import Serve, Served
from ...fake_engine import LENGTH, MODEL, WAIT_S, row, say_all
from ..answers import sse
from ..serving import CALL, FAILED, PARAMETERS, ROOMY
from .test_reading import CODING_AGENT

PATH = "/v1/messages"
HI: list[anthropic.types.MessageParam] = [{"role": "user", "content": "hi"}]
BODY = {"model": MODEL, "max_tokens": 9, "messages": HI}
TOOL: anthropic.types.ToolParam = {"name": "f", "input_schema": PARAMETERS}


ClientOf = Callable[..., anthropic.Anthropic]


@pytest.fixture
def client_of() -> Iterator[ClientOf]:
    """Makes clients that are closed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def make(served: Served, api_key: str = "none") -> anthropic.Anthropic:
            client = anthropic.Anthropic(base_url=served.url, api_key=api_key, max_retries=0, timeout=WAIT_S)
            return stack.enter_context(client)

        yield make


def test_an_answer_in_one_piece(serve: Serve, client_of: ClientOf):
    client = client_of(serve(say_all("Hel", "lo", cached=4)))
    answer = client.messages.create(model=MODEL, max_tokens=9, messages=HI, system="be brief")

    assert answer.id.startswith("msg_")
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text == "Hello"  # type: ignore[union-attr]
    assert (answer.stop_reason, answer.stop_sequence, answer.model) == ("end_turn", None, MODEL)
    assert answer.usage.cache_read_input_tokens == 4
    assert answer.usage.output_tokens == 5
    counted = client.messages.count_tokens(model=MODEL, messages=HI, system="be brief")
    assert answer.usage.input_tokens + 4 == counted.input_tokens


def test_a_stream(serve: Serve, client_of: ClientOf):
    client = client_of(serve(say_all("Hel", "lo", cached=4)))
    with client.messages.stream(model=MODEL, max_tokens=9, messages=HI) as stream:
        assert "".join(stream.text_stream) == "Hello"
        final = stream.get_final_message()

    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", 5)
    assert final.usage.cache_read_input_tokens == 4


def test_a_call(serve: Serve, client_of: ClientOf):
    served = serve(say_all(CALL[:20], CALL[20:]), capacity=ROOMY)
    client = client_of(served)
    with client.messages.stream(model=MODEL, max_tokens=99, messages=HI, tools=[TOOL]) as stream:
        streamed = stream.get_final_message()
    whole = client.messages.create(model=MODEL, max_tokens=99, messages=HI, tools=[TOOL])

    for message in (streamed, whole):
        [call] = message.content
        assert (call.type, call.name, call.input) == ("tool_use", "f", {"a": 1})  # type: ignore[union-attr]
        assert message.stop_reason == "tool_use"


@pytest.mark.parametrize(
    ("finish", "expected"),
    [
        (LENGTH, ("max_tokens", None)),
        (Finish(FinishKind.STOP, matched="END"), ("stop_sequence", "END")),
        (Finish(FinishKind.STOP, matched="grammar"), ("end_turn", None)),
    ],
)
def test_stop_reasons(serve: Serve, finish: Finish, expected: tuple[str, str | None]):
    served = serve(say_all("a", finish=finish))
    body = BODY | {"stop_sequences": ["END"]}
    whole = served.client.post(PATH, json=body).json()
    delta = sse(served.client.post(PATH, json=body | {"stream": True}).content)[-2][1]["delta"]

    assert (whole["stop_reason"], whole["stop_sequence"]) == expected
    assert (delta["stop_reason"], delta["stop_sequence"]) == expected


def test_a_coding_agents_request_is_answered_and_counted(serve: Serve):
    served = serve(say_all('{"response": "ok"}'), capacity=ROOMY)
    body = CODING_AGENT | {"model": MODEL, "max_tokens": 99}
    events = sse(served.client.post(f"{PATH}?beta=true", json=body).content)
    counted = served.client.post(f"{PATH}/count_tokens?beta=true", json=body).json()

    assert [name for name, _ in events][-2:] == ["message_delta", "message_stop"]
    usage = events[0][1]["message"]["usage"]
    assert usage["input_tokens"] + usage["cache_creation_input_tokens"] == counted["input_tokens"]
    assert usage["cache_creation"] == {
        "ephemeral_5m_input_tokens": usage["cache_creation_input_tokens"],
        "ephemeral_1h_input_tokens": 0,
    }
    assert len(served.engine.next_request().input_ids) == 4 * counted["input_tokens"]


def test_keys(serve: Serve, client_of: ClientOf):
    served = serve(say_all("x"), api_key=("right",))

    assert served.client.post(PATH, json=BODY, headers={"x-api-key": "right"}).status_code == 200
    assert served.client.post(PATH, json=BODY, headers={"authorization": "Bearer right"}).status_code == 200
    assert client_of(served, "right").messages.count_tokens(model=MODEL, messages=HI).input_tokens > 0
    with pytest.raises(anthropic.AuthenticationError):
        client_of(served, "wrong").messages.create(model=MODEL, max_tokens=9, messages=HI)
    other = served.client.get("/v1/models", headers={"x-api-key": "right"})
    assert other.status_code == 401, "only on Anthropic's routes"


def test_errors_have_anthropics_form(serve: Serve, client_of: ClientOf):
    served = serve(say_all("x"))
    reply = served.client.post(PATH, json=BODY | {"max_tokens": -1})
    body = reply.json()

    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["error"]["message"].startswith("max_tokens is -1")
    assert body["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    with pytest.raises(anthropic.NotFoundError):
        client_of(served).messages.create(model="other", max_tokens=9, messages=HI)
    assert served.client.post(f"{PATH}/none").json()["error"]["type"] == "not_found_error"


def test_a_stream_that_fails_ends_with_an_error_event(serve: Serve):
    served = serve(lambda request: [row(request, "some"), row(request, "", finish=FAILED)])
    name, data = sse(served.client.post(PATH, json=BODY | {"stream": True}).content)[-1]

    assert name == "error"
    assert data["error"] == {"type": "api_error", "message": "out of luck"}


def test_closing_a_stream_aborts_it(serve: Serve, client_of: ClientOf):
    served = serve(lambda request: [row(request, "some")])
    stream = client_of(served).messages.create(model=MODEL, max_tokens=9, messages=HI, stream=True)
    next(iter(stream))
    stream.close()

    assert served.engine.next_abort().rid == served.engine.next_request().rid


def test_a_full_queue_is_a_429_in_anthropics_form(serve: Serve):
    served = serve(max_queued_requests=1)
    waiting = [served.post_later("/v1/completions", json={"prompt": "hi", "n": 3}) for _ in range(3)]
    for _ in range(9):
        served.engine.next_request()
    reply = served.client.post(PATH, json=BODY)

    assert reply.status_code == 429
    assert reply.json()["error"]["type"] == "rate_limit_error"
    assert int(reply.headers["retry-after"]) >= 1
    served.engine.loop.call_soon_threadsafe(served.services.manager.engine_died, "over")  # type: ignore[union-attr]
    assert [one.result(WAIT_S).status_code for one in waiting] == [503] * 3
    assert served.client.post(PATH, json=BODY).json()["error"]["type"] == "overloaded_error"


# ---------------------------------------------------------------- the prefix cache

CACHED = {"type": "ephemeral"}
LONG: Any = [{"role": "user", "content": [{"type": "text", "text": "hi " * 100, "cache_control": CACHED}]}]


@pytest.mark.parametrize(("ttl", "keep_s"), [(None, 300.0), ("5m", 300.0), ("1h", 3600.0)])
def test_a_breakpoint_keeps_the_prompt_and_usage_says_what_it_wrote(
    serve: Serve, client_of: ClientOf, ttl: Any, keep_s: float
):
    served = serve(say_all("x"), capacity=ROOMY)
    system: Any = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral", "ttl": ttl}}]
    usage = client_of(served).messages.create(model=MODEL, max_tokens=9, messages=LONG, system=system).usage
    request = served.engine.next_request()

    assert request.keep_s == keep_s
    page_size, prompt_len = ROOMY.page_size, len(request.input_ids) // 4
    written = prompt_len // page_size * page_size
    assert (usage.input_tokens, usage.cache_creation_input_tokens) == (prompt_len - written, written)
    creation = usage.cache_creation
    assert creation is not None
    times = creation.ephemeral_5m_input_tokens, creation.ephemeral_1h_input_tokens
    assert times == ((0, written) if ttl == "1h" else (written, 0))


def test_a_request_without_a_breakpoint_asks_nothing_of_the_cache(serve: Serve):
    served = serve(say_all("x"), capacity=ROOMY)
    usage = served.client.post(PATH, json=BODY).json()["usage"]

    assert served.engine.next_request().keep_s is None
    assert usage["cache_creation_input_tokens"] == 0 and "cache_creation" not in usage


def test_a_breakpoint_of_another_time_is_refused(serve: Serve):
    body = BODY | {"cache_control": {"type": "ephemeral", "ttl": "2h"}}
    reply = serve(say_all("x")).client.post(PATH, json=body)
    assert reply.status_code == 400 and "cache_control" in reply.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_at_all_computes_the_prompt_only(serve: Serve, client_of: ClientOf, stream: bool):
    served = serve(say_all("never seen"), capacity=ROOMY)
    tools: Any = [{"name": "t", "input_schema": {"type": "object"}}]
    body: Any = {"model": MODEL, "max_tokens": 0, "messages": LONG, "tools": tools}
    body["tool_choice"] = {"type": "any"}
    if stream:
        with client_of(served).messages.stream(**body) as events:
            message = events.get_final_message()
    else:
        message = client_of(served).messages.create(**body)
    request = served.engine.next_request()

    assert (request.sampling.max_new_tokens, request.grammar, request.keep_s) == (1, None, 300.0)
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)


# ---------------------------------------------------------------- diagnostics

TOOLS: Any = [{"name": "t", "input_schema": {"type": "object"}}]
TURN: Any = {"model": MODEL, "max_tokens": 9, "system": "be brief", "tools": TOOLS}
ASKED: Any = [{"role": "user", "content": "hi " * 100}]
MOVED: Any = [{"role": "user", "content": [{"type": "text", "text": "hi " * 100, "cache_control": CACHED}]}]
ANSWERED: Any = [{"role": "assistant", "content": "x"}, {"role": "user", "content": "go on"}]


@pytest.mark.parametrize(
    ("cached", "turn", "kind"),
    [
        (10_000, TURN | {"messages": [*ASKED, *ANSWERED]}, None),
        (10_000, TURN | {"messages": [*MOVED, *ANSWERED]}, None),
        (0, TURN | {"messages": [*ASKED, *ANSWERED]}, "unavailable"),
        (0, TURN | {"messages": [*ASKED, *ANSWERED], "tools": []}, "tools_changed"),
        (0, TURN | {"messages": [*ASKED, *ANSWERED], "tools": [], "system": "be long"}, "system_changed"),
        (0, TURN | {"messages": ANSWERED[1:]}, "messages_changed"),
        (16, TURN | {"messages": [{"role": "user", "content": "ho"}, *ANSWERED]}, "messages_changed"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_diagnostics_name_the_part_that_has_changed(
    serve: Serve, client_of: ClientOf, cached: int, turn: Any, kind: str | None, stream: bool
):
    client = client_of(serve(say_all("x", cached=cached), capacity=ROOMY))
    first = client.messages.create(**TURN, messages=ASKED, diagnostics={"previous_message_id": None})
    assert first.diagnostics is None
    asks: Any = {"diagnostics": {"previous_message_id": first.id}}
    if stream:
        with client.messages.stream(**turn, **asks) as events:
            message = events.get_final_message()
    else:
        message = client.messages.create(**turn, **asks)

    if kind is None:
        assert message.diagnostics is None
        return
    assert message.diagnostics is not None and message.diagnostics.cache_miss_reason is not None
    reason: Any = message.diagnostics.cache_miss_reason
    assert reason.type == kind
    if kind != "unavailable":
        prompt_len = first.usage.input_tokens + first.usage.cache_read_input_tokens
        assert reason.cache_missed_input_tokens == prompt_len - cached


def test_messages_that_are_not_known_have_no_diagnosis(serve: Serve, client_of: ClientOf):
    served = serve(say_all("x"), capacity=ROOMY, api_key=("a", "b"))

    def ask(key: str, **fields: Any) -> Any:
        headers = {"x-api-key": key}
        return served.client.post(PATH, json=TURN | {"messages": ASKED} | fields, headers=headers).json()

    silent = ask("a")
    assert "diagnostics" not in silent
    known = ask("a", diagnostics={})
    for key, message_id in (("a", silent["id"]), ("b", known["id"]), ("a", "msg_of_yesterday")):
        answer = ask(key, diagnostics={"previous_message_id": message_id})
        assert answer["diagnostics"] == {"cache_miss_reason": {"type": "previous_message_not_found"}}
    wrong = ask("a", diagnostics={"previous_message_id": 5})
    assert wrong["error"]["message"].startswith("diagnostics.previous_message_id")
