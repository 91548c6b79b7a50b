"""From a generation to a response: streamed as server-sent events, or collected into one body.

`best_of` generates more answers than are returned, and returns the most likely ones. The order is OpenAI's: by mean
log-probability per token, so that long answers are not at a disadvantage. It needs complete answers, so such a request
does not stream. Usage counts all generated answers.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from msgspec import UNSET, UnsetType

from ...runtime.config.answer_config import RequestLimits
from ...runtime.errors import RequestError
from ...runtime.messages import REPETITION, Finish, TextOutput
from ..conversation.deltas import CallArguments, CallBegin, CallEnd, Content, Delta, Reasoning, merged
from ..generation import Choice, Generation, Row
from .exchange import EVENT_STREAM, Exchange
from .schema.values import check_count
from .token_logprobs import TokenLogprob, int32s, unpack


def finish_reason(finish: Finish | None) -> str | None:
    """OpenAI's `finish_reason`; `abort` is an extension, for requests ended by `/abort_request`."""
    return None if finish is None else finish.kind.value


def stop_reason(finish: Finish | None) -> str | UnsetType:
    """vLLM's `stop_reason` of an answer that repeats itself; other ends have none here."""
    return REPETITION if finish is not None and finish.matched == REPETITION else UNSET


class AnswerWriter(Protocol):
    """Writes the stream of one API."""

    def events(self, row: Row, deltas: Sequence[Delta]) -> bytes:
        """The events for one row, framed; may be empty. `deltas`: what the row adds."""
        ...

    def closing(self) -> bytes:
        """The end of the stream, framed."""
        ...


async def stream(
    exchange: Exchange,
    generation: Generation,
    writer: AnswerWriter,
    media_type: bytes = EVENT_STREAM,
    before_end: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Send a generation as events.

    The response begins with the first row, so that a request that fails before it gets an HTTP status.

    Args:
        before_end: called when the last row is written, before `writer.closing`.

    Raises:
        EngineError: the generation failed; the answer sent so far is incomplete.
    """
    async for rows in generation:
        if not exchange.streaming:
            await exchange.start_events(media_type)
        events = b"".join([writer.events(row, row.choice.read(row.output)) for row in rows])
        if events:
            await exchange.send_events(events)
    if before_end is not None:
        await before_end()
    await exchange.end_events(writer.closing())


class CollectedCall(NamedTuple):
    """A whole tool call. `arguments` is JSON, or the text of a custom tool; cut if the answer was."""

    id: str
    name: str
    arguments: str
    custom: bool


class Collected:
    """All rows of one choice, joined.

    Attributes:
        text, token_ids, finish, logprobs, prompt_logprobs: of the rows.
        content, reasoning, calls: of their deltas.
    """

    def __init__(self) -> None:
        self.text = ""
        self.token_ids = int32s(b"")
        self.finish: Finish | None = None
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.content = ""
        self.reasoning = ""
        self.calls: list[CollectedCall] = []

    def add(self, output: TextOutput, prompt_ids: array[int], deltas: Iterable[Delta] = ()) -> None:
        """Append a row."""
        self.text += output.text
        ids = int32s(output.token_ids)
        self.token_ids += ids
        if output.logprobs is not None:
            self.logprobs += unpack(output.logprobs, ids)
        if output.prompt_logprobs is not None:
            num_tokens = output.prompt_logprobs.num_tokens
            self.prompt_logprobs = unpack(output.prompt_logprobs, prompt_ids[len(prompt_ids) - num_tokens :])
        if output.finish is not None:
            self.finish = output.finish
        for delta in deltas:
            match delta:
                case Reasoning(text):
                    self.reasoning += text
                case Content(text):
                    self.content += text
                case CallBegin(id=id_, name=name, custom=custom):
                    self.calls.append(CollectedCall(id_, name, "", custom))
                case CallArguments(call, text):
                    known = self.calls[call]
                    self.calls[call] = known._replace(arguments=known.arguments + text)
                case CallEnd():
                    pass


async def collect(generation: Generation) -> list[Collected]:
    """Wait for a generation to finish; one entry per choice.

    Raises:
        EngineError: the generation failed.
    """
    collected = [Collected() for _ in generation.choices]
    is_chat = generation.request.plan is not None
    async for rows in generation:
        for choice, output in rows:
            deltas = choice.read(output)
            collected[choice.index].add(output, choice.prompt_ids, deltas if is_chat else ())
    return collected


async def collect_deltas(generation: Generation) -> Iterator[Delta]:
    """Wait for a generation of one choice to finish; its answer in as few deltas as there are parts.

    Raises:
        EngineError: the generation failed.
    """
    deltas: list[Delta] = []
    async for rows in generation:
        for choice, output in rows:
            deltas += choice.read(output)
    return merged(deltas)


def num_generated(n: int, best_of: int | None, limits: RequestLimits, *, stream: bool) -> int:
    """Answers to generate per prompt for `n`, which is checked already, and `best_of`.

    Raises:
        RequestError: `best_of` is out of range, below `n`, or cannot be streamed.
    """
    if best_of is None:
        return n
    check_count("best_of", best_of, 1, limits.max_n, "max_n")
    if best_of < n:
        rule = f"n is {n}, and the best n are chosen among best_of; raise best_of or lower n"
    elif best_of > n and stream:
        rule = f"n is {n}, and which are best is known only in the end; leave out stream or best_of"
    else:
        return best_of
    raise RequestError(f"best_of is {best_of}, but {rule}", param="best_of", code="invalid_value")


def best_answers(generation: Generation, answers: Sequence[Collected]) -> list[tuple[Choice, Collected]]:
    """The answers to return, prompt by prompt: the best first, or all in their order without ranking."""
    pairs = list(zip(generation.choices, answers, strict=True))
    request = generation.request
    if not request.is_ranked:
        return pairs
    best: list[tuple[Choice, Collected]] = []
    for first in range(0, len(pairs), request.n):
        of_prompt = pairs[first : first + request.n]
        of_prompt.sort(key=lambda pair: _mean_logprob(pair[1]), reverse=True)  # stable: ties keep their order
        best += of_prompt[: request.num_returned]
    return best


def _mean_logprob(answer: Collected) -> float:
    """An answer without tokens (it ended before the first) ranks last."""
    if not answer.logprobs:
        return -math.inf
    return math.fsum(entry.logprob for entry in answer.logprobs) / len(answer.logprobs)
