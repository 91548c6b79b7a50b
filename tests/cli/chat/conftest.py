"""A backend and a server that answer from a script, and a conversation around the backend."""

from __future__ import annotations

import http.server
import io
import json
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine.cli.chat.backend import AnswerChunk
from engine.cli.chat.conversation import Conversation
from engine.cli.chat.screen import Screen
from engine.cli.chat.session import ChatSession, Message, text_and_images
from engine.cli.chat.settings import ChatSettings
from engine.runtime.messages import Usage

Step = str | BaseException


@dataclass
class ScriptedBackend:
    """Says the steps of `script`, one piece each, and raises those that are exceptions. A word is a token."""

    script: Sequence[Step] = ("Hello", " there")
    model: str = "scripted"
    where: str = "in a script"
    max_context: int | None = 100
    finish_reason: str = "stop"
    counts: bool = True
    seen: list[list[Message]] = field(default_factory=list)
    num_closed: int = 0
    is_closed: bool = False
    sight: bool | None = True

    def sees_images(self) -> bool | None:
        return self.sight

    def answer(
        self, messages: Sequence[Message], settings: ChatSettings
    ) -> Generator[AnswerChunk, None, None]:
        self.seen.append(list(messages))
        prompt_tokens = self._count(messages)
        try:
            for number, step in enumerate(self.script, 1):
                if isinstance(step, BaseException):
                    raise step
                yield AnswerChunk(step, Usage(prompt_tokens, number, 2))
            yield AnswerChunk("", Usage(prompt_tokens, len(self.script), 2), self.finish_reason)
        finally:
            self.num_closed += 1

    def count_tokens(self, messages: Sequence[Message]) -> int | None:
        return self._count(messages) if self.counts else None

    def about(self) -> str:
        return "Q4 on paper"

    def close(self) -> None:
        self.is_closed = True

    def _count(self, messages: Sequence[Message]) -> int:
        return sum(len(text_and_images(message["content"])[0].split()) for message in messages)


@dataclass
class Chat:
    """A conversation, its backend, and what was written."""

    conversation: Conversation
    backend: ScriptedBackend
    out: io.StringIO

    @property
    def session(self) -> ChatSession:
        return self.conversation.session

    def written(self) -> str:
        """What was written since the last call."""
        text = self.out.getvalue()
        self.out.seek(0)
        self.out.truncate()
        return text


@pytest.fixture(autouse=True)
def no_running_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of other tests are not found."""
    monkeypatch.setattr("engine.cli.server_client.running_servers", list)


@pytest.fixture
def make_chat() -> Callable[..., Chat]:
    """A conversation with a scripted backend and a clock that goes 0.5 s per look."""

    def make(**options: object) -> Chat:
        backend, out, ticks = ScriptedBackend(**options), io.StringIO(), iter(range(10_000))  # type: ignore[arg-type]
        conversation = Conversation(ChatSession(), backend, Screen(out), clock=lambda: next(ticks) * 0.5)
        return Chat(conversation, backend, out)

    return make


@dataclass
class ScriptedServer:
    """Answers each path with a status and a body; keeps what it was sent."""

    replies: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    url: str = ""
    retry_after: str | None = None
    later: tuple[int, Callable[[], None]] | None = None

    def after(self, num_questions: int, change: Callable[[], None]) -> None:
        """Change something with the answer to the last of so many questions more."""
        self.later = (len(self.bodies) + num_questions, change)

    def say(self, path: str, document: object, status: int = 200) -> None:
        self.replies[path] = (status, json.dumps(document).encode())

    def stream(self, *events: object, done: bool = True) -> None:
        data = [event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n" for event in events]
        text = "".join(data) + ("data: [DONE]\n\n" if done else "")
        self.replies["/v1/chat/completions"] = (200, text.encode())


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    script = ScriptedServer()
    script.say("/v1/models", {"data": [{"id": "first", "max_model_len": 77}, {"id": "second"}]})

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            if length:
                script.bodies.append(json.loads(self.rfile.read(length)))
            script.keys.append(self.headers.get("authorization"))
            status, body = script.replies.get(self.path, (404, b"not here"))
            retry_after = script.retry_after
            # Before this answer is sent, for the client may ask again at once.
            if script.later is not None and len(script.bodies) >= script.later[0]:
                change, script.later = script.later[1], None
                change()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            if self.path == "/":
                self.send_header("content-type", "text/html")
            if retry_after is not None:
                self.send_header("retry-after", retry_after)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = answer  # noqa: N815

        def log_message(self, *_args: object) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True).start()
        script.url = f"http://127.0.0.1:{listening.server_address[1]}"
        yield script
        listening.shutdown()
