"""`Delta`: the parts of an answer as they are generated; every API writes its stream from them.

An answer is any number of reasoning and content deltas, and of calls; parts of different calls do not interleave.
`merged` joins them for answers in one piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Reasoning(NamedTuple):
    """More text of the reasoning."""

    text: str


class Content(NamedTuple):
    """More text of the answer."""

    text: str


class CallBegin(NamedTuple):
    """A tool call begins.

    Attributes:
        call: counts the calls of an answer from 0.
        id: of the call, unique: "call_" and 24 hex digits, or as the model's family has it.
        name: of the tool.
        custom: the tool takes a text (OpenAI's custom tools) instead of JSON arguments.
    """

    call: int
    id: str
    name: str
    custom: bool = False


class CallArguments(NamedTuple):
    """More of a call's arguments: the pieces, joined, are a JSON object, or the text for a custom tool."""

    call: int
    text: str


class CallEnd(NamedTuple):
    """A call is complete. An answer that is cut (length) may have no such delta for its last call."""

    call: int


Delta = Reasoning | Content | CallBegin | CallArguments | CallEnd


_Kind = type[Reasoning] | type[Content] | int | None
"""Key of deltas that can be joined: the number of a call for its arguments; None: cannot be joined."""


def merged(deltas: Iterable[Delta]) -> Iterator[Delta]:
    """The same answer with neighbors of one kind joined."""
    kind: _Kind = None
    texts: list[str] = []
    for delta in deltas:
        new = _kind_of(delta)
        if new is None or new != kind:
            yield from _joined(kind, texts)
            kind, texts = new, []
        if isinstance(delta, CallBegin | CallEnd):
            yield delta
        else:
            texts.append(delta.text)
    yield from _joined(kind, texts)


def _kind_of(delta: Delta) -> _Kind:
    if isinstance(delta, CallArguments):
        return delta.call
    return None if isinstance(delta, CallBegin | CallEnd) else type(delta)


def _joined(kind: _Kind, texts: list[str]) -> Iterator[Delta]:
    text = "".join(texts)
    if kind is None or not text:
        return
    yield CallArguments(kind, text) if isinstance(kind, int) else kind(text)
