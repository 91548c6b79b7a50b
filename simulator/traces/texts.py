"""Conversations of workload files with texts: pairs of a question and the recorded answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...runtime.errors import ConfigError
from .kinds import TraceKind, kind_of
from .rows import rows_of

_QUESTIONERS: Final = frozenset({"human", "user"})
_ANSWERERS: Final = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard", "model"})


class Exchange(NamedTuple):
    """A question and its answer."""

    question: str
    answer: str


def conversations(path: Path) -> Iterator[list[Exchange]]:
    """The conversations of a file that have at least one question with an answer.

    Messages out of turn and system prompts are left out; so are contents that are not texts.

    Raises:
        ConfigError: the file cannot be read, or it is a timed trace, which has no texts.
    """
    kind = kind_of(path)
    if kind.is_timed:
        raise ConfigError(f"{path} is {kind.value}, which has no texts; replay it as a trace")
    for row in rows_of(path):
        turns = _alpaca(row.values) if kind is TraceKind.ALPACA else _turns(_messages(row.values))
        if turns:
            yield turns


def _alpaca(row: Mapping[str, Any]) -> list[Exchange]:
    parts = [row.get("instruction"), row.get("input") or None]
    question = "\n\n".join(part for part in parts if isinstance(part, str) and part)
    answer = row.get("output")
    return [Exchange(question, answer)] if question and isinstance(answer, str) and answer else []


def _messages(row: Mapping[str, Any]) -> list[Any]:
    for name in ("conversations", "conversation", "messages"):
        if isinstance(row.get(name), list):
            return list(row[name])
    return []


def _turns(messages: list[Any]) -> list[Exchange]:
    turns: list[Exchange] = []
    question: str | None = None
    for message in messages:
        if not isinstance(message, dict):
            continue
        sender = message.get("from", message.get("role"))
        text = message.get("value", message.get("content"))
        if not isinstance(text, str) or not text:
            continue
        if sender in _QUESTIONERS:
            question = text
        elif sender in _ANSWERERS and question is not None:
            turns.append(Exchange(question, text))
            question = None
    return turns
