from __future__ import annotations

import json
from typing import Any

import httpx
import ollama
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tokenizer_manager.conversation.deltas import CallArguments, CallBegin, Delta, merged
from engine.tokenizer_manager.http.ollama.convert import CONTENT_TYPE, Durations, OllamaStream
from tests.selection import examples

from ..answers import answers, plain, rows_of

DURATIONS = Durations(30, 7, 10, 5, 20)


def written(rows: list[list[Delta]], *, chat: bool = True) -> bytes:
    stream = OllamaStream("m", chat=chat)
    return b"".join(map(stream.events, rows)) + stream.complete("stop", DURATIONS, [])


def read_by_client(stream: bytes) -> list[Any]:
    """The parts that Ollama's client makes of a stream."""

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-type": CONTENT_TYPE.decode()}, content=stream)

    client = ollama.Client("http://test", transport=httpx.MockTransport(answer))
    return list(client.chat("m", [{"role": "user", "content": "hi"}], stream=True))


def test_a_call_that_is_cut_is_not_sent():
    [last] = read_by_client(written([[CallBegin(0, "call_0", "f"), CallArguments(0, '{"a"')]]))

    assert last.message.tool_calls is None
    assert (last.done, last.done_reason, last.eval_count, last.total_duration) == (True, "stop", 5, 30)


def test_generate_has_a_response_instead_of_a_message():
    lines = [json.loads(line) for line in written([], chat=False).splitlines()]

    assert [line["response"] for line in lines] == [""]
    assert "message" not in lines[0]


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_the_client_reads_any_answer(data):
    deltas = data.draw(answers())
    parts = read_by_client(written(data.draw(rows_of(deltas))))
    whole = OllamaStream("m", chat=True).whole(merged(deltas), "stop", DURATIONS, [])

    expected = plain(deltas)
    content = "".join(part[1] for part in expected if part[0] == "content")
    thinking = "".join(part[1] for part in expected if part[0] == "reasoning")
    calls = [(part[2], json.loads(part[3])) for part in expected if part[0] == "call"]
    assert "".join(part.message.content or "" for part in parts) == content
    assert "".join(part.message.thinking or "" for part in parts) == thinking
    assert [
        (call.function.name, call.function.arguments)
        for part in parts
        for call in part.message.tool_calls or []
    ] == calls
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert whole.message.content == content  # type: ignore[attr-defined]
