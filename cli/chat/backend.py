"""`Backend`: the protocol of a model that answers the chat, and the pieces of an answer."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .session import Message
from .settings import ChatSettings


@dataclass(frozen=True, slots=True)
class AnswerUsage:
    """Tokens of one answer: the prompt's, those of them that came from the prefix cache, and the generated ones."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Call(NamedTuple):
    """A tool call, or a piece of one: pieces of the same `number` are joined."""

    number: int
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class AnswerChunk:
    """A piece of an answer; usage and finish reason come with the last pieces, if the backend knows them."""

    text: str
    usage: AnswerUsage | None = None
    finish_reason: str | None = None
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


class Backend(Protocol):
    """A model that answers.

    Attributes:
        model: its name.
        where: `in this process`, `at http://...`.
        max_context: tokens of prompt and answer together; None if unknown.
    """

    model: str
    where: str
    max_context: int | None

    def answer(
        self, messages: Sequence[Message], settings: ChatSettings
    ) -> Generator[AnswerChunk, None, None]:
        """Stream the answer; closing the generator stops it, in the engine too.

        Raises:
            RequestError: this conversation or these settings cannot be answered.
            EngineError: the engine or the server failed.
        """
        ...

    def count_tokens(self, messages: Sequence[Message]) -> int | None:
        """Tokens of the rendered conversation; None if the backend cannot count."""
        ...

    def close(self) -> None:
        """Release the backend."""
        ...


def why_it_cannot_chat(model: str, task: str) -> str:
    """The sentence about a model that generates no text, with the command for it.

    Args:
        task: "embed" or "score".
    """
    if task == "embed":
        return f"{model} makes vectors of texts and cannot chat; use `engine embed` with it, or chat with another model"
    return f"{model} scores texts and cannot chat; use `engine rerank` with it, or chat with another model"
