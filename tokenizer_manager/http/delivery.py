"""From a generation to a response: streamed as server-sent events, or collected into one body.

`best_of` generates more answers than are returned, and returns the most likely ones. The order is OpenAI's: by mean
log-probability per token, so that long answers are not at a disadvantage. It needs complete answers, so such a request
does not stream. Usage counts all generated answers.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ...runtime.config.request_limits import RequestLimits
from ...runtime.errors import RequestError
from ...runtime.messages import Finish, TextOutput
from ..generation import Choice, Generation, Row
from .exchange import Exchange
from .framing import DONE
from .schema.values import check_count
from .token_logprobs import TokenLogprob, int32s, unpack


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


class Wanted(NamedTuple):
    """The number of answers per prompt.

    Attributes:
        returned: `n`.
        generated: `best_of`; the same as `returned` without ranking.
    """

    returned: int
    generated: int

    @property
    def ranked(self) -> bool:
        """Whether some answers are left out."""
        return self.generated > self.returned

    def logprobs(self, asked: int | None) -> int | None:
        """The log-probabilities to compute: as the client asked, or those of the sampled tokens, for ranking."""
        return 0 if asked is None and self.ranked else asked


def wanted_answers(n: int, best_of: int | None, limits: RequestLimits, *, stream: bool) -> Wanted:
    """The numbers of answers for `n`, which is checked already, and `best_of`.

    Raises:
        RequestError: `best_of` is out of range, below `n`, or cannot be streamed.
    """
    if best_of is None:
        return Wanted(n, n)
    check_count("best_of", best_of, 1, limits.max_n, "max_n")
    if best_of < n:
        rule = f"n is {n}, and the best n are chosen among best_of; raise best_of or lower n"
    elif best_of > n and stream:
        rule = f"n is {n}, and which are best is known only in the end; leave out stream or best_of"
    else:
        return Wanted(n, best_of)
    raise RequestError(f"best_of is {best_of}, but {rule}", param="best_of", code="invalid_value")


def best_answers(
    generation: Generation, answers: Sequence[Collected], wanted: Wanted
) -> list[tuple[Choice, Collected]]:
    """The answers to return, prompt by prompt: the best first, or all in their order without ranking."""
    pairs = list(zip(generation.choices, answers, strict=True))
    if not wanted.ranked:
        return pairs
    best: list[tuple[Choice, Collected]] = []
    for first in range(0, len(pairs), wanted.generated):
        of_prompt = pairs[first : first + wanted.generated]
        of_prompt.sort(key=lambda pair: _mean_logprob(pair[1]), reverse=True)  # stable: ties keep their order
        best += of_prompt[: wanted.returned]
    return best


def _mean_logprob(answer: Collected) -> float:
    """An answer without tokens (it ended before the first) ranks last."""
    if not answer.logprobs:
        return -math.inf
    return math.fsum(entry.logprob for entry in answer.logprobs) / len(answer.logprobs)
