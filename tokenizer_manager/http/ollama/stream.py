"""`OllamaStream`: writes the lines of `/api/chat` and `/api/generate` from deltas.

Each line is a JSON object. A call is sent when it is complete, with its arguments as an object; one that is cut is not
sent. An answer in one piece has the joined texts and all calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Final, NamedTuple

from msgspec import UNSET

from ...conversation.deltas import CallArguments, CallBegin, CallEnd, Content, Delta, Reasoning
from ..ndjson import line
from ..surfaces.cut_json import object_of
from .bodies import (
    CalledFunction,
    OllamaAnswer,
    OllamaCall,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaMessage,
)

CONTENT_TYPE: Final = b"application/x-ndjson"


class Durations(NamedTuple):
    """The end of an answer: token counts, and times in nanoseconds."""

    total_ns: int
    prompt_tokens: int
    prompt_ns: int
    output_tokens: int
    output_ns: int


class Part(NamedTuple):
    """Part of an answer."""

    content: str = ""
    thinking: str = ""
    calls: tuple[OllamaCall, ...] = ()


class OllamaStream:
    """Writes one answer."""

    def __init__(self, model: str, *, chat: bool, now: Callable[[], datetime] | None = None) -> None:
        """Begin.

        Args:
            model: the name that the request has.
            chat: write for `/api/chat`; otherwise for `/api/generate`.
            now: a clock.
        """
        self._model = model
        self._chat = chat
        self._now = now or (lambda: datetime.now(UTC))
        self._call: tuple[str, str] | None = None  # id and name of the open one
        self._arguments: list[str] = []

    def events(self, deltas: Iterable[Delta]) -> bytes:
        """The lines for some deltas."""
        return b"".join(line(self._body(part)) for part in self.parts(deltas))

    def complete(self, done_reason: str, durations: Durations | None, warnings: list[str]) -> bytes:
        """The last line."""
        return line(self.whole([], done_reason, durations, warnings))

    def whole(
        self, deltas: Iterable[Delta], done_reason: str, durations: Durations | None, warnings: list[str]
    ) -> OllamaAnswer:
        """The answer in one piece, of all deltas."""
        parts = list(self.parts(deltas))
        body = self._body(
            Part(
                "".join(part.content for part in parts),
                "".join(part.thinking for part in parts),
                tuple(call for part in parts for call in part.calls),
            )
        )
        body.done = True
        body.done_reason = done_reason
        if durations is not None:
            body.total_duration = durations.total_ns
            body.load_duration = 0
            body.prompt_eval_count = durations.prompt_tokens
            body.prompt_eval_duration = durations.prompt_ns
            body.eval_count = durations.output_tokens
            body.eval_duration = durations.output_ns
        body.warnings = warnings or UNSET
        return body

    def parts(self, deltas: Iterable[Delta]) -> Iterable[Part]:
        """The parts of the answer; a call is one part."""
        for delta in deltas:
            match delta:
                case Reasoning(text):
                    yield Part(thinking=text)
                case Content(text):
                    yield Part(content=text)
                case CallBegin(_, call_id, name):
                    self._call = (call_id, name)
                    self._arguments.clear()
                case CallArguments(_, text):
                    self._arguments.append(text)
                case CallEnd() if self._call is not None:
                    call_id, name = self._call
                    self._call = None
                    arguments = object_of("".join(self._arguments))
                    yield Part(calls=(OllamaCall(call_id, CalledFunction(name, arguments)),))

    def _body(self, part: Part) -> OllamaAnswer:
        created_at = self._now().isoformat().replace("+00:00", "Z")
        thinking = part.thinking or UNSET
        if not self._chat:
            return OllamaGenerateBody(
                model=self._model, created_at=created_at, response=part.content, thinking=thinking
            )
        message = OllamaMessage(content=part.content, thinking=thinking, tool_calls=list(part.calls) or UNSET)
        return OllamaChatBody(model=self._model, created_at=created_at, message=message)
