"""Answers as sequences of deltas, for tests of writers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

from engine.tokenizer_manager.conversation.deltas import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Delta,
    Reasoning,
)

texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
objects = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=4),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
        max_leaves=4,
    ),
    max_size=3,
)


@st.composite
def answers(draw: st.DrawFn, custom: bool = False) -> list[Delta]:
    """Reasoning, content and whole calls in any order, in any pieces."""
    deltas: list[Delta] = []
    call = 0
    for kind in draw(st.lists(st.sampled_from(["reasoning", "content", "call"]), max_size=6)):
        if kind == "call":
            is_custom = custom and draw(st.booleans())
            deltas.append(CallBegin(call, f"call_{call:024x}", f"tool_{call}", is_custom))
            text = draw(texts) if is_custom else json.dumps(draw(objects))
            deltas += [CallArguments(call, piece) for piece in draw(pieces_of(text))]
            deltas.append(CallEnd(call))
            call += 1
        else:
            make = Reasoning if kind == "reasoning" else Content
            deltas += [make(piece) for piece in draw(pieces_of(draw(texts)))]
    return deltas


@st.composite
def pieces_of(draw: st.DrawFn, text: str) -> list[str]:
    """A text in some pieces."""
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=3)) | {0, len(text)})
    return [text[begin:end] for begin, end in itertools.pairwise(cuts)]


@st.composite
def rows_of(draw: st.DrawFn, deltas: list[Delta]) -> list[list[Delta]]:
    """Deltas in some rows."""
    cuts = sorted(draw(st.sets(st.integers(0, len(deltas)), max_size=4)) | {0, len(deltas)})
    return [deltas[begin:end] for begin, end in itertools.pairwise(cuts)]


def sse(stream: bytes) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream: names and data; checks the framing."""
    blocks = stream.split(b"\n\n")
    assert blocks.pop() == b""
    events = []
    for block in blocks:
        name, data = block.split(b"\n")
        assert name.startswith(b"event: ") and data.startswith(b"data: ")
        events.append((name[7:].decode(), json.loads(data[6:])))
    return events


def plain(deltas: Iterable[Delta]) -> list[tuple[Any, ...]]:
    """The parts of an answer: kinds and whole texts."""
    parts: list[tuple[Any, ...]] = []
    for delta in deltas:
        match delta:
            case Reasoning(text) | Content(text):
                kind = type(delta).__name__.lower()
                if parts and parts[-1][0] == kind:
                    parts[-1] = (kind, parts[-1][1] + text)
                else:
                    parts.append((kind, text))
            case CallBegin(_, call_id, name, custom):
                parts.append(("custom" if custom else "call", call_id, name, ""))
            case CallArguments(_, text):
                kind, call_id, name, before = parts[-1]
                parts[-1] = (kind, call_id, name, before + text)
            case CallEnd():
                pass
    return parts
