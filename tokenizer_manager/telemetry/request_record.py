"""`RequestRecord`: the times and counts of one HTTP request, copied when it has ended; `Traces`, which takes them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from ..generation import Generation


class ChoiceRecord(NamedTuple):
    """One answer of a request. Times are those of `Choice`; `finish` is "" if the client did not get its end."""

    number: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    num_retractions: int
    queue_s: float
    first_token_s: float | None
    last_token_s: float | None
    finish: str


class GenerationRecord(NamedTuple):
    """One generation. Times are those of `Generation`."""

    id: str
    arrival_s: float
    opened_s: float
    grammar_ready_s: float | None
    choices: tuple[ChoiceRecord, ...]


class RequestRecord(NamedTuple):
    """One HTTP request that generates, or was refused.

    Attributes:
        path: of its route.
        status: of the response.
        error_code: of the error that ended it, also within a stream; "" for none.
        context: the headers `traceparent` and `tracestate`, if the client sent them.
        started_s, ended_s: by the manager's clock, as all times here.
        clock_offset_ns: Unix time minus that clock.
    """

    method: str
    path: str
    status: int
    error_code: str
    request_id: str
    context: dict[str, str]
    started_s: float
    ended_s: float
    clock_offset_ns: int
    generations: tuple[GenerationRecord, ...]


class TracedExchange(Protocol):
    """The source of a record: `http.exchange.Exchange`."""

    method: str
    path: str
    status: int
    error_code: str
    request_id: str
    headers: dict[bytes, bytes]
    started_s: float
    generations: list[Generation]


class Traces(Protocol):
    """Takes requests that have ended."""

    def ended(self, exchange: TracedExchange, now_s: float) -> None:
        """A request has been answered, or its client is gone. Must not block or raise."""
        ...

    def close(self) -> None:
        """Send what is left, within a second."""
        ...


class NoTraces:
    """Without `--otlp-endpoint`."""

    def ended(self, exchange: TracedExchange, now_s: float) -> None:
        pass

    def close(self) -> None:
        pass


def record_of(exchange: TracedExchange, now_s: float) -> RequestRecord:
    """A copy of what a trace needs; without prompts and answers."""
    return RequestRecord(
        exchange.method,
        exchange.path,
        exchange.status,
        exchange.error_code,
        exchange.request_id,
        _context(exchange.headers),
        exchange.started_s,
        now_s,
        time.time_ns() - int(now_s * 1e9),
        tuple(_generation(each) for each in exchange.generations),
    )


def _context(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    names: Sequence[bytes] = (b"traceparent", b"tracestate")
    return {name.decode(): headers[name].decode("latin-1") for name in names if name in headers}


def _generation(generation: Generation) -> GenerationRecord:
    return GenerationRecord(
        generation.id,
        generation.arrival_s,
        generation.opened_s,
        generation.grammar_ready_s,
        tuple(
            ChoiceRecord(
                choice.index,
                choice.usage.prompt_tokens,
                choice.usage.completion_tokens,
                choice.usage.cached_tokens,
                choice.usage.num_retractions,
                choice.usage.queue_s,
                choice.first_token_s,
                choice.last_token_s,
                "" if choice.finish is None else choice.finish.kind.value,
            )
            for choice in generation.choices
        ),
    )
