"""Readers of formats that shape the whole answer: `generic` and harmony's channels."""

from __future__ import annotations

import re
from typing import Final

from .emitter import Emitter
from .families import GENERIC
from .json_calls import begin_known, read_json_call
from .json_text import JsonScanner, StringDecoder
from .source import Markers, Source, Trouble, Waits

_HEADER_END: Final = Markers(["<|message|>", "<|start|>"])
_BODY_END: Final = Markers(["<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>"])
_FIRST_MARKERS: Final = ("<|channel|>", "<|start|>", "<|message|>", "to=")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"\bto=(?:functions\.)?([A-Za-z0-9_.:\-]+)")
_MAX_HEADER_CHARS: Final = 512


def read_generic(source: Source, emitter: Emitter) -> Waits:
    """Read `{"tool_calls": [...]}` or `{"response": ...}`. An answer that is cut in this envelope has no content.

    Raises:
        Trouble: the answer is neither.
    """
    yield from source.skip_space()
    source.mark = source.pos
    try:
        yield from _read_envelope(source, emitter)
    except Trouble:
        if not source.at_end:
            raise
        source.mark = None


def _read_envelope(source: Source, emitter: Emitter) -> Waits:
    if not (yield from source.literal("{")):
        raise Trouble
    yield from source.skip_space()
    if (yield from source.literal('"response"')):
        yield from _colon(source)
        source.mark = None
        yield from _read_response(source, emitter)
    elif not source.at_end and (yield from source.literal('"tool_calls"')):
        yield from _read_generic_calls(source, emitter)
    else:
        raise Trouble
    yield from source.pieces(("}",))


def _read_generic_calls(source: Source, emitter: Emitter) -> Waits:
    yield from _colon(source)
    if not (yield from source.literal("[")):
        raise Trouble
    while True:
        yield from source.skip_space()
        yield from read_json_call(source, emitter, GENERIC)
        yield from source.skip_space()
        if not (yield from source.literal(",")):
            break
    yield from source.pieces(("]",))


def _colon(source: Source) -> Waits:
    if not (yield from source.pieces((":",))):
        raise Trouble
    yield from source.skip_space()


def _read_response(source: Source, emitter: Emitter) -> Waits:
    """The text of a string, or another JSON value as it is."""
    if (yield from source.literal('"')):
        decoder = StringDecoder()
        while True:
            text, source.pos, done = decoder.decode(source.text, source.pos, source.final)
            emitter.content(text)
            if done or source.final:
                return
            yield
    scanner = JsonScanner()
    while True:
        end, done = scanner.scan(source.text, source.pos)
        emitter.content(source.text[source.pos : end])
        source.pos = end
        if done or source.final:
            return
        yield


def read_harmony(source: Source, emitter: Emitter) -> Waits:
    """Read messages of channels: analysis is reasoning, a message to a tool is a call, all else is content."""
    source.mark = source.pos
    yield from source.skip_space()
    begin = source.pos - source.mark
    for marker in _FIRST_MARKERS:
        if (yield from source.literal(marker)):
            source.pos = source.mark + begin
            source.mark = None
            break
        source.pos = source.mark + begin
    else:
        source.pos = source.mark
        source.mark = None
        return  # no channels: the text is content
    while True:
        header = ""
        while True:
            text, marker = source.before(_HEADER_END)
            header = (header + text)[:_MAX_HEADER_CHARS]
            if marker == "<|message|>" or source.at_end:
                break
            if marker:
                header = ""
            else:
                yield
        if marker != "<|message|>":
            return  # the text ended in a header, which is not content
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        yield from _read_body(
            source, emitter, channel[1] if channel else "", recipient[1] if recipient else "", header
        )
        if source.at_end:
            return


def _read_body(source: Source, emitter: Emitter, channel: str, recipient: str, header: str) -> Waits:
    is_call = recipient in emitter.tools
    is_reasoning = channel == "analysis" and not is_call
    if is_call:
        begin_known(source, emitter, recipient)
    elif is_reasoning:
        emitter.begin_reasoning(f"{header}<|message|>")
    scanner, is_whole = JsonScanner(), False
    while True:
        text, end = source.before(_BODY_END)
        if is_call:
            emitter.arguments(text)
            is_whole = is_whole or scanner.scan(text, 0)[1]
        elif is_reasoning:
            emitter.reasoning(text)
        else:
            emitter.content(text)
        if end:
            break
        if source.final:
            # <|call|> ends an answer as an EOS token, which has no text: the JSON shows whether a call is complete.
            if is_whole:
                emitter.end_call()
            return
        yield
    if is_call:
        emitter.end_call()
    elif is_reasoning:
        emitter.end_reasoning(end)
    if end in ("<|start|>", "<|channel|>"):  # of the next message
        source.pos -= len(end)
