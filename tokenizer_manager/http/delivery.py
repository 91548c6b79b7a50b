"""From a generation to a response: streamed as server-sent events, or collected into one body."""

from __future__ import annotations

from array import array
from typing import Final, Protocol

import msgspec

from ...runtime.messages import Finish, TextOutput
from ..generation import Generation, Row
from .exchange import Exchange
from .logprobs.entries import TokenLogprob, int32s, unpack

_encoder: Final = msgspec.json.Encoder()
DONE: Final = b"data: [DONE]\n\n"


def event(data: object) -> bytes:
    """One server-sent event."""
    return b"data: " + _encoder.encode(data) + b"\n\n"


def error_event(data: object) -> bytes:
    """The event that ends a failed stream; `[DONE]` never follows it."""
    return b"event: error\n" + event(data)


def finish_reason(finish: Finish | None) -> str | None:
    """OpenAI's `finish_reason`; `abort` is an extension, for requests ended by `/abort_request`."""
    return None if finish is None else finish.kind.value


class Answer(Protocol):
    """Writes the stream of one API."""

    def events(self, row: Row) -> bytes:
        """The events for one row, framed; may be empty."""
        ...

    def closing(self) -> bytes:
        """The events after the last row, framed, without `[DONE]`."""
        ...


async def stream(exchange: Exchange, generation: Generation, answer: Answer) -> None:
    """Send a generation as events.

    The response begins with the first row, so that a request that fails before it gets an HTTP status.

    Raises:
        EngineError: the generation failed; the answer sent so far is incomplete.
    """
    async for rows in generation:
        if not exchange.streaming:
            await exchange.start_events()
        events = b""
        for row in rows:
            row.choice.read(row.output)
            events += answer.events(row)
        if events:
            await exchange.send_events(events)
    await exchange.end_events(answer.closing() + DONE)


class Collected:
    """All rows of one choice, joined."""

    __slots__ = ("finish", "logprobs", "prompt_logprobs", "text", "token_ids")

    def __init__(self) -> None:
        self.text = ""
        self.token_ids = int32s(b"")
        self.finish: Finish | None = None
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []

    def add(self, output: TextOutput, prompt_ids: array[int]) -> None:
        """Append a row."""
        self.text += output.text
        ids = int32s(output.token_ids)
        self.token_ids += ids
        if output.logprobs is not None:
            self.logprobs += unpack(output.logprobs, ids)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = unpack(output.prompt_logprobs, prompt_ids[1:])
        if output.finish is not None:
            self.finish = output.finish


async def collect(generation: Generation) -> list[Collected]:
    """Wait for a generation to finish; one entry per choice.

    Raises:
        EngineError: the generation failed.
    """
    collected = [Collected() for _ in generation.choices]
    async for rows in generation:
        for row in rows:
            row.choice.read(row.output)
            collected[row.choice.index].add(row.output, row.choice.prompt_ids)
    return collected
