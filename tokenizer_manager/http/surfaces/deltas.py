"""`merged`: fewer and longer deltas, for answers in one piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...conversation.deltas import CallArguments, CallBegin, CallEnd, Content, Delta, Reasoning

_Kind = type[Reasoning] | type[Content] | int | None
"""Of the deltas that can be joined: the number of a call for its arguments; None: cannot be joined."""


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
