from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx2
import msgspec
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
from engine.tokenizer_manager.http.anthropic.endpoint import MessageStream
from engine.tokenizer_manager.http.anthropic.wire import MessageBody, MessageUsage, OutputTokensDetails
from tests.selection import examples

from ..answers import answers, rows_of, sse

BEGIN = MessageUsage(
    input_tokens=4, cache_read_input_tokens=3, output_tokens=1, output_tokens_details=OutputTokensDetails(0)
)
END = MessageUsage(
    input_tokens=4, cache_read_input_tokens=3, output_tokens=9, output_tokens_details=OutputTokensDetails(2)
)


def written(rows: list[list[Delta]]) -> tuple[bytes, dict[str, Any]]:
    """A stream, and the message in one piece."""
    writer = MessageStream(MessageBody(id="msg_1", model="m", usage=BEGIN))
    stream = writer.begin(BEGIN) + b"".join(map(writer.events, rows))
    stream += writer.complete("end_turn", None, END)
    return stream, json.loads(msgspec.json.encode(writer.body))


def client_of(answer: httpx2.Response) -> anthropic.Anthropic:
    http = httpx2.Client(transport=httpx2.MockTransport(lambda request: answer))
    return anthropic.Anthropic(base_url="http://test", api_key="none", http_client=http, max_retries=0)


def read_by_client(stream: bytes) -> dict[str, Any]:
    """The message that Anthropic's client puts together."""
    client = client_of(httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=stream))
    with client.messages.stream(
        model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}]
    ) as events:
        return events.get_final_message().to_dict()


def parsed_by_client(body: dict[str, Any]) -> dict[str, Any]:
    client = client_of(httpx2.Response(200, json=body))
    message = client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}])
    return message.to_dict()


def test_the_order_of_events():
    deltas: list[Delta] = [
        Reasoning("hm"),
        Content("Hello"),
        CallBegin(0, "call_0", "f"),
        CallArguments(0, '{"a": 1}'),
        CallEnd(0),
    ]
    stream, _ = written([deltas])
    events = sse(stream)

    assert [(name, data.get("delta", {}).get("type")) for name, data in events] == [
        ("message_start", None),
        ("ping", None),
        ("content_block_start", None),
        ("content_block_delta", "thinking_delta"),
        ("content_block_delta", "signature_delta"),
        ("content_block_stop", None),
        ("content_block_start", None),
        ("content_block_delta", "text_delta"),
        ("content_block_stop", None),
        ("content_block_start", None),
        ("content_block_delta", "input_json_delta"),
        ("content_block_stop", None),
        ("message_delta", None),
        ("message_stop", None),
    ]
    assert events[0][1]["message"]["usage"]["input_tokens"] == 4
    assert events[9][1]["content_block"] == {"type": "tool_use", "id": "call_0", "name": "f", "input": {}}
    assert events[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


def test_a_cut_call_has_its_complete_members():
    _, body = written([[CallBegin(0, "call_0", "f"), CallArguments(0, '{"a": 1, "b": "x')]])

    assert body["content"][0]["input"] == {"a": 1}


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_any_answer_is_well_formed_and_the_client_puts_the_same_message_together(data):
    deltas = data.draw(answers())
    stream, body = written(data.draw(rows_of(deltas)))
    events = sse(stream)

    assert [name for name, _ in events] == [event["type"] for _, event in events]
    open_index, next_index = None, 0
    for name, event in events[2:-2]:
        if name == "content_block_start":
            assert open_index is None
            assert event["index"] == next_index
            open_index, next_index = event["index"], next_index + 1
        assert event["index"] == open_index
        if name == "content_block_stop":
            open_index = None
    assert open_index is None
    assert len(body["content"]) == next_index
    assert read_by_client(stream)["content"] == parsed_by_client(body)["content"]
    assert read_by_client(stream)["usage"] == parsed_by_client(body)["usage"]


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_a_message_in_one_piece_has_the_blocks_of_the_stream(data):
    deltas = data.draw(answers())

    assert written(data.draw(rows_of(deltas)))[1] == written([list(merged(deltas))])[1]
