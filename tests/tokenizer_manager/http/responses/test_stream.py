from __future__ import annotations

import itertools
from typing import Any

import httpx
import openai
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tokenizer_manager.conversation.deltas import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Delta,
    Reasoning,
    merged,
)
from engine.tokenizer_manager.http.responses.stream import ResponseStream
from engine.tokenizer_manager.http.responses.wire import (
    InputDetails,
    OutputDetails,
    ResponseBody,
    ResponseError,
    ResponsesUsage,
)
from tests.selection import examples

from ..answers import answers, plain, rows_of, sse

USAGE = ResponsesUsage(7, InputDetails(3), 5, OutputDetails(2), 12)


def make_stream() -> ResponseStream:
    numbers = itertools.count()
    body = ResponseBody(id="resp_1", created_at=1, model="m")
    return ResponseStream(body, lambda prefix: f"{prefix}_{next(numbers)}")


def written(rows: list[list[Delta]], finish_reason: str = "stop") -> tuple[bytes, ResponseStream]:
    stream = make_stream()
    text = stream.begin() + b"".join(map(stream.events, rows))
    return text + stream.complete(finish_reason, USAGE, 2) + stream.last_event(), stream


def read_by_client(stream: bytes) -> tuple[list[Any], Any]:
    """The events that OpenAI's client makes of a stream, and its final response if there is one."""

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=stream)

    http: Any = httpx.Client(transport=httpx.MockTransport(answer))
    client = openai.OpenAI(base_url="http://test/v1", api_key="none", http_client=http, max_retries=0)
    with client.responses.stream(model="m", input="hi") as events:
        seen = list(events)
        return seen, events.get_final_response() if seen[-1].type == "response.completed" else None


def test_the_order_of_events():
    deltas: list[Delta] = [
        Reasoning("hm"),
        Content("Hel"),
        Content("lo"),
        CallBegin(0, "call_0", "f"),
        CallArguments(0, "{}"),
        CallEnd(0),
        CallBegin(1, "call_1", "g", custom=True),
        CallArguments(1, "text"),
        CallEnd(1),
    ]
    stream, _ = written([deltas])
    events = sse(stream)

    assert [name.removeprefix("response.") for name, _ in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]
    assert [item["type"] for item in events[-1][1]["response"]["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "custom_tool_call",
    ]


def test_a_call_without_arguments_has_an_empty_object():
    stream, writer = written([[CallBegin(0, "call_0", "f"), CallEnd(0)]])

    [item] = writer.body.output
    assert item.arguments == "{}"  # type: ignore[union-attr]
    deltas = [data["delta"] for name, data in sse(stream) if name.endswith("arguments.delta")]
    assert deltas == ["{}"]


def test_a_cut_answer_is_incomplete_and_keeps_the_raw_beginning_of_its_call():
    stream, _ = written([[CallBegin(0, "call_0", "f"), CallArguments(0, '{"a": ')]], "length")

    name, data = sse(stream)[-1]
    assert name == "response.incomplete"
    assert data["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert data["response"]["output"][0]["arguments"] == '{"a": '
    assert data["response"]["output"][0]["status"] == "incomplete"


def test_a_failure_ends_the_open_item():
    stream = make_stream()
    events = sse(
        stream.begin()
        + stream.events([Content("a")])
        + stream.break_off("failed", ResponseError("c", "m"), USAGE)
        + stream.last_event()
    )

    assert [name for name, _ in events[-2:]] == ["response.output_item.done", "response.failed"]
    assert events[-1][1]["response"]["error"] == {"code": "c", "message": "m"}
    assert events[-1][1]["response"]["status"] == "failed"


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_any_answer_is_well_formed_and_the_client_reads_it(data):
    deltas = data.draw(answers(custom=True))
    stream, _ = written(data.draw(rows_of(deltas)))
    events = sse(stream)

    assert [name for name, _ in events] == [body["type"] for _, body in events]
    assert [body["sequence_number"] for _, body in events] == list(range(len(events)))
    added = [body for name, body in events if name == "response.output_item.added"]
    done = [body for name, body in events if name == "response.output_item.done"]
    assert [body["output_index"] for body in added] == list(range(len(added)))
    assert [body["item"]["id"] for body in added] == [body["item"]["id"] for body in done]
    final = events[-1][1]["response"]
    assert final["output"] == [body["item"] for body in done]
    open_index = None  # items do not interleave, and each event of an item names it
    for name, body in events[2:-1]:
        if name == "response.output_item.added":
            assert open_index is None
            open_index = body["output_index"]
        assert body["output_index"] == open_index
        if "item_id" in body:
            assert body["item_id"] == added[open_index]["item"]["id"]
        if name == "response.output_item.done":
            open_index = None
    _, response = read_by_client(stream)
    assert parts_of(response.output) == plain(deltas)
    assert response.usage.input_tokens_details.cached_tokens == 3


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_an_answer_in_one_piece_has_the_items_of_the_stream(data):
    deltas = data.draw(answers(custom=True))
    _, streamed = written(data.draw(rows_of(deltas)))
    _, whole = written([list(merged(deltas))])

    assert plain(merged(deltas)) == plain(deltas)
    assert streamed.body.output == whole.body.output


def parts_of(items: Any) -> list[tuple[Any, ...]]:
    """The parts of an answer that the client has read."""
    parts: list[tuple[Any, ...]] = []
    for item in items:
        match item.type:
            case "reasoning":
                parts.append(("reasoning", item.content[0].text))
            case "message":
                parts.append(("content", item.content[0].text))
            case "function_call":
                parts.append(("call", item.call_id, item.name, item.arguments))
            case _:
                parts.append(("custom", item.call_id, item.name, item.input))
    return parts
