"""A backend that answers from a script, and a conversation around it."""

from __future__ import annotations

import io
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import pytest

from engine.cli.chat.backend import AnswerChunk, AnswerUsage
from engine.cli.chat.conversation import Conversation
from engine.cli.chat.screen import Screen
from engine.cli.chat.session import ChatSession, Message
from engine.cli.chat.settings import ChatSettings

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

    def answer(
        self, messages: Sequence[Message], settings: ChatSettings
    ) -> Generator[AnswerChunk, None, None]:
        self.seen.append(list(messages))
        prompt_tokens = self._count(messages)
        try:
            for number, step in enumerate(self.script, 1):
                if isinstance(step, BaseException):
                    raise step
                yield AnswerChunk(step, AnswerUsage(prompt_tokens, number, 2))
            yield AnswerChunk("", AnswerUsage(prompt_tokens, len(self.script), 2), self.finish_reason)
        finally:
            self.num_closed += 1

    def count_tokens(self, messages: Sequence[Message]) -> int | None:
        return self._count(messages) if self.counts else None

    def close(self) -> None:
        self.is_closed = True

    def _count(self, messages: Sequence[Message]) -> int:
        return sum(len(message["content"].split()) for message in messages)


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


@pytest.fixture
def make_chat() -> Callable[..., Chat]:
    """A conversation with a scripted backend and a clock that goes 0.5 s per look."""

    def make(**options: object) -> Chat:
        backend, out, ticks = ScriptedBackend(**options), io.StringIO(), iter(range(10_000))  # type: ignore[arg-type]
        conversation = Conversation(
            ChatSession(), backend, Screen.for_conversation(out), clock=lambda: next(ticks) * 0.5
        )
        return Chat(conversation, backend, out)

    return make
