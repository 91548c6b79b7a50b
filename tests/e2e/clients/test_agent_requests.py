"""Requests that two coding agents sent, answered again: statuses, sequences of events, counts of tokens.

`agent_requests/` has bodies that Codex (`codex exec`, 0.169) and Claude Code (`claude -p`, 2.1) sent to a server of the
default model; both ran their loops of calls and results against it. Texts are shortened to 100 characters, ids are
zeros. To record new ones, put a proxy between, with `--served-model-name '*'` and:

    ANTHROPIC_BASE_URL=http://127.0.0.1:PORT ANTHROPIC_API_KEY=x claude -p "list the files" --tools Bash,Read
    codex exec "list the files"    # config.toml: a model provider with base_url and wire_api = "responses"
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Protocol

import httpx
import jsonschema_rs
import pytest
from anthropic.types import Message
from openai.types.responses import Response

from ..serving import EngineServe

pytestmark = pytest.mark.real_process

FOLDER: Final = Path(__file__).with_name("agent_requests")
CODEX: Final = sorted(path.stem for path in FOLDER.glob("codex_*.json"))
CLAUDE: Final = sorted(path.stem for path in FOLDER.glob("claude_code_*.json"))
MAX_TOKENS: Final = 150
ANSWER_S: Final = 240.0  # the first prompt has 5,000 tokens: half a minute on two cores
OF_ITEM: Final = {
    "message": ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"],
    "reasoning": ["reasoning_text.delta", "reasoning_text.done"],
    "function_call": ["function_call_arguments.delta", "function_call_arguments.done"],
    "custom_tool_call": ["custom_tool_call_input.delta", "custom_tool_call_input.done"],
}


class HasUrl(Protocol):
    """A server."""

    @property
    def url(self) -> str: ...


class Recorded:
    """One request of an agent."""

    def __init__(self, name: str) -> None:
        request = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        self.path: str = request["path"]
        self.headers: dict[str, str] = request["headers"]
        self.body: dict[str, Any] = request["body"]

    def send(self, engine: HasUrl, path: str | None = None, **fields: Any) -> httpx.Response:
        body = {key: value for key, value in (self.body | fields).items() if value is not None}
        url = f"{engine.url}{path or self.path}"
        return httpx.post(url, json=body, headers=self.headers, timeout=ANSWER_S)


def sse(stream: bytes) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream: names and data."""
    *blocks, rest = stream.decode().split("\n\n")
    assert rest == ""
    pairs = (block.split("\n") for block in blocks)
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]


def test_the_requests_are_there():
    assert len(CODEX) >= 4
    assert len(CLAUDE) >= 5


# ---------------------------------------------------------------- Codex: /v1/responses


def check_codex(engine: HasUrl, name: str) -> None:
    recorded = Recorded(name)
    reply = recorded.send(engine, max_output_tokens=MAX_TOKENS)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = sse(reply.content)

    names = [name for name, _ in events]
    final = events[-1][1]["response"]
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names[-1] == f"response.{final['status']}"
    assert final["status"] in ("completed", "incomplete")
    assert [data["type"] for _, data in events] == names
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert not [text for text in final.get("warnings", []) if "unknown" in text]
    Response.model_validate(final)
    assert final["output"], "an answer has an item"
    for index, item in enumerate(final["output"]):
        check_item(index, item, [data for _, data in events if data.get("output_index") == index])
    if final["status"] == "completed" and (form := (recorded.body.get("text") or {}).get("format")):
        for item in final["output"]:
            if item["type"] == "message":
                jsonschema_rs.validate(form["schema"], json.loads(item["content"][0]["text"]))
    counted = recorded.send(engine, "/v1/responses/input_tokens").json()
    assert counted["input_tokens"] == final["usage"]["input_tokens"]


def check_item(index: int, item: dict[str, Any], events: list[dict[str, Any]]) -> None:
    """The events of an item stand together, in order, and add up to it."""
    first, *inner, last = events
    assert [event["type"] for event in (first, last)] == [
        "response.output_item.added",
        "response.output_item.done",
    ]
    assert last["item"] == item
    assert first["item"]["id"] == item["id"]
    assert {event["item_id"] for event in inner} <= {item["id"]}
    kinds = [event["type"].removeprefix("response.") for event in inner]
    assert list(dict.fromkeys(kinds)) == [kind for kind in OF_ITEM[item["type"]] if kind in kinds]
    text = "".join(event["delta"] for event in inner if event["type"].endswith(".delta"))
    match item["type"]:
        case "function_call":
            assert item["arguments"] == text
            assert item["status"] == "incomplete" or isinstance(json.loads(text), dict)
        case "message":
            assert item["content"][0]["text"] == text


@pytest.mark.slow  # against a fake engine: tests/tokenizer_manager/http/test_agent_requests.py
@pytest.mark.parametrize("name", CODEX)
def test_codex(long_serve: EngineServe, name: str):
    check_codex(long_serve, name)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("name", CODEX)
def test_codex_with_the_default_model(default_serve: EngineServe, name: str):
    check_codex(default_serve, name)


# ---------------------------------------------------------------- Claude Code: /v1/messages and its count


def check_claude(engine: HasUrl, name: str) -> None:
    recorded = Recorded(name)
    counted = recorded.send(engine, "/v1/messages/count_tokens?beta=true")
    assert counted.status_code == 200, counted.text
    assert counted.json()["input_tokens"] > 0
    fields = {"max_tokens": MAX_TOKENS, "stream": True}
    reply = recorded.send(engine, "/v1/messages?beta=true", **fields)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")

    [(start, begun), (ping, _), *blocks, (delta, ended), (stop, _)] = sse(reply.content)
    assert (start, ping, delta, stop) == ("message_start", "ping", "message_delta", "message_stop")
    message = begun["message"]
    assert Message.model_validate(message).model == recorded.body["model"]
    assert not [text for text in message.get("warnings", []) if "unknown" in text]
    usage = message["usage"]
    parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert sum(usage[part] for part in parts) == counted.json()["input_tokens"]
    kinds = check_blocks(blocks)
    is_cut = ended["delta"]["stop_reason"] == "max_tokens"
    assert is_cut or ended["delta"]["stop_reason"] == ("tool_use" if "tool_use" in kinds else "end_turn")
    assert 0 < ended["usage"]["output_tokens"] <= MAX_TOKENS
    assert recorded.send(engine, "/v1/messages", **fields | {"stream": False}).json()["type"] == "message"


def check_blocks(events: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Blocks follow each other, with dense indices; returns their types."""
    kinds: list[str] = []
    is_open = False
    for name, data in events:
        match name:
            case "content_block_start":
                assert not is_open
                assert data["index"] == len(kinds)
                kinds.append(data["content_block"]["type"])
                assert data["content_block"].get("input", {}) == {}
                is_open = True
            case "content_block_delta":
                assert is_open
                assert data["index"] == len(kinds) - 1
                expected = {"text": "text_delta", "tool_use": "input_json_delta"}[kinds[-1]]
                assert data["delta"]["type"] == expected
            case "content_block_stop":
                assert is_open
                is_open = False
            case _:
                pytest.fail(name)
    assert not is_open
    return kinds


@pytest.mark.slow
@pytest.mark.parametrize("name", CLAUDE)
def test_claude_code(long_serve: EngineServe, name: str):
    check_claude(long_serve, name)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("name", CLAUDE)
def test_claude_code_with_the_default_model(default_serve: EngineServe, name: str):
    check_claude(default_serve, name)
