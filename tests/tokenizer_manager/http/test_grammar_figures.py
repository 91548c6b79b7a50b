"""`usage.grammar` and `truncated` of the APIs: how hard the grammar had to push, and where an answer was cut."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from engine.runtime.messages import Finish, FinishKind, GrammarUsage, Overruled
from tests.tokenizer_manager.conftest import Serve
from tests.tokenizer_manager.fake_engine import MODEL, TOKENIZER, row
from tests.tokenizer_manager.http.serving import ROOMY
from tests.tokenizer_manager.http.test_chat import events

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}}},
    "required": ["a"],
    "additionalProperties": False,
}
TEXT = '{"a":[1,23]}'
USAGE = GrammarUsage(
    compile_s=0.0015,
    mask_s=0.00025,
    forced_tokens=6,
    overruled_tokens=2,
    first_overruled=Overruled(8, TOKENIZER.encode("x")[0], TOKENIZER.encode("2")[0]),
    cut_at=9,
)
REPORT = {
    "compile_ms": 1.5,
    "mask_us": 250,
    "forced_tokens": 6,
    "overruled_tokens": 2,
    "first_overruled": {"at": "/a/1", "wanted": "x", "got": "2"},
}
CUT = {"at": "/a/1", "forced_tokens": 3}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 64}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


def script(request):
    """The answer in two rows. Free text has no such figures."""
    usage = USAGE if request.grammar is not None else None
    matched = "grammar" if request.grammar is not None else None
    for text, total, finish in (
        (TEXT[:9], 9, None),
        (TEXT[9:], len(TEXT), Finish(FinishKind.LENGTH, matched=matched)),
    ):
        output = row(request, text, total=total, finish=finish)
        yield replace(output, usage=replace(output.usage, grammar=usage), ended_by_detokenizer=False)


def posted(serve: Serve, path: str, body: dict[str, Any]) -> Any:
    served = serve(script, capacity=ROOMY)
    response = served.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json() if not body.get("stream") else events(response.text)


def test_chat(serve: Serve):
    body = posted(serve, "/v1/chat/completions", CHAT | {"response_format": FORMAT})
    assert body["usage"]["grammar"] == REPORT
    assert body["choices"][0]["truncated"] == CUT and body["choices"][0]["finish_reason"] == "length"


def test_a_stream_of_a_chat(serve: Serve):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = posted(serve, "/v1/chat/completions", CHAT | {"response_format": FORMAT} | options)
    assert usage["usage"]["grammar"] == REPORT
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[-1]["truncated"] == CUT
    assert not any("truncated" in choice for choice in choices[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_completions(serve: Serve, stream):
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    body = {"prompt": "x", "max_tokens": 64, "guided_json": SCHEMA}
    answer = posted(serve, "/v1/completions", body | options)
    last = answer[-2] if stream else answer
    assert last["choices"][0]["truncated"] == CUT
    assert (answer[-1] if stream else answer)["usage"]["grammar"] == REPORT


def test_several_answers_are_added(serve: Serve):
    body = posted(serve, "/v1/chat/completions", CHAT | {"response_format": FORMAT, "n": 2})
    assert body["usage"]["grammar"] == REPORT | {
        "compile_ms": 3.0,
        "mask_us": 500,
        "forced_tokens": 12,
        "overruled_tokens": 4,
    }
    assert [choice["truncated"] for choice in body["choices"]] == [CUT, CUT]


@pytest.mark.parametrize("stream", [False, True])
def test_generate(serve: Serve, stream):
    body = {"text": "x", "sampling_params": {"json_schema": SCHEMA}, "stream": stream}
    answer = posted(serve, "/generate", body)
    meta = (answer[-1] if stream else answer)["meta_info"]
    assert (meta["grammar"], meta["truncated"]) == (REPORT, CUT)
    assert not stream or "grammar" not in answer[0]["meta_info"]


def test_responses(serve: Serve):
    text = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
    body = posted(serve, "/v1/responses", {"input": "x", "text": text})
    assert body["usage"]["grammar"] == REPORT and body["truncated"] == CUT
    assert body["status"] == "incomplete"


def test_messages(serve: Serve):
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    body = posted(serve, "/v1/messages", CHAT | {"model": MODEL, "output_config": config})
    assert body["usage"]["grammar"] == REPORT and body["usage"]["truncated"] == CUT


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "x"}),
        ("/generate", {"text": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", CHAT | {"model": MODEL}),
    ],
)
def test_free_text_has_neither(serve: Serve, path, body):
    answer = posted(serve, path, body)
    assert "grammar" not in (answer.get("usage") or answer["meta_info"])
    assert "truncated" not in str(answer)
