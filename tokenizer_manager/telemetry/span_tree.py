"""`write_spans`: the spans of a request, from its record.

    chat MODEL              the HTTP request, a child of the client's span
      receive               head and body, checks
      tokenize              chat template, tokens, admission
      grammar               until its grammar is compiled, if it has a new one
      queue                 arrival at the scheduler to first admission
      prefill               to the first token
      decode                to the last token, detokenization included
      send                  to the end of the response

The names of attributes are those of OpenTelemetry's GenAI semantic conventions where they have one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from .request_record import ChoiceRecord, GenerationRecord, RequestRecord

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer
    from opentelemetry.util.types import AttributeValue

OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/api/generate": "text_completion",
}
"""The paths that generate, with `gen_ai.operation.name`."""
_CLIENT_GONE: Final = "client_disconnected"


class Phase(NamedTuple):
    """A part of a request's life; times by the manager's clock."""

    name: str
    start_s: float
    end_s: float
    choice: int | None = None


def phases(record: RequestRecord) -> Iterator[Phase]:
    """The parts of a request's life that it reached, each with an end not before its start."""
    if not record.generations:
        yield Phase("receive", record.started_s, record.ended_s)
        return
    yield Phase("receive", record.started_s, record.generations[0].arrival_s)
    for generation in record.generations:
        yield Phase("tokenize", generation.arrival_s, generation.opened_s)
        if generation.grammar_ready_s is not None:
            yield Phase("grammar", generation.opened_s, generation.grammar_ready_s)
        for choice in generation.choices:
            yield from _of_choice(record, generation, choice)


def _of_choice(record: RequestRecord, generation: GenerationRecord, choice: ChoiceRecord) -> Iterator[Phase]:
    first_s, last_s = choice.first_token_s, choice.last_token_s
    if first_s is None or last_s is None:
        yield Phase("queue", generation.opened_s, record.ended_s, choice.number)
        return
    admitted_s = min(generation.opened_s + choice.queue_s, first_s)
    yield Phase("queue", generation.opened_s, admitted_s, choice.number)
    yield Phase("prefill", admitted_s, first_s, choice.number)
    yield Phase("decode", first_s, last_s, choice.number)
    yield Phase("send", last_s, max(last_s, record.ended_s), choice.number)


def write_spans(tracer: Tracer, record: RequestRecord, model: str) -> None:
    """Make the spans of a request, ended."""
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    def unix_ns(time_s: float) -> int:
        return int(time_s * 1e9) + record.clock_offset_ns

    parent = TraceContextTextMapPropagator().extract(record.context)
    attributes = dict(_attributes(record, model))
    root = tracer.start_span(
        f"{OPERATIONS.get(record.path, record.method)} {model}",
        context=parent,
        kind=trace.SpanKind.SERVER,
        attributes=attributes,
        start_time=unix_ns(record.started_s),
    )
    if root.is_recording():
        if "error.type" in attributes:
            root.set_status(trace.Status(trace.StatusCode.ERROR))
        for generation in record.generations:
            for choice in generation.choices:
                if choice.first_token_s is not None:
                    ttft_s = choice.first_token_s - generation.arrival_s
                    facts = {"gen_ai.server.time_to_first_token": ttft_s, "engine.choice": choice.number}
                    root.add_event("first token", facts, unix_ns(choice.first_token_s))
        own = trace.set_span_in_context(root)
        for phase in phases(record):
            about = {} if phase.choice is None else {"engine.choice": phase.choice}
            span = tracer.start_span(
                phase.name, context=own, attributes=about, start_time=unix_ns(phase.start_s)
            )
            span.end(unix_ns(max(phase.start_s, phase.end_s)))
    root.end(unix_ns(record.ended_s))


def _attributes(record: RequestRecord, model: str) -> Iterator[tuple[str, AttributeValue]]:
    yield "gen_ai.operation.name", OPERATIONS.get(record.path, record.method)
    yield "gen_ai.provider.name", "engine"
    yield "gen_ai.request.model", model
    yield "gen_ai.response.model", model
    yield "http.request.method", record.method
    yield "http.route", record.path
    yield "http.response.status_code", record.status
    yield "engine.request_id", record.request_id
    choices = [choice for generation in record.generations for choice in generation.choices]
    unfinished = any(not choice.finish for choice in choices)
    if record.error_code or unfinished:
        yield "error.type", record.error_code or _CLIENT_GONE
    if not choices:
        return
    yield "gen_ai.response.id", record.generations[0].id
    yield "gen_ai.response.finish_reasons", [choice.finish for choice in choices if choice.finish]
    yield "gen_ai.usage.input_tokens", sum(choice.prompt_tokens for choice in choices)
    yield "gen_ai.usage.output_tokens", sum(choice.completion_tokens for choice in choices)
    yield "gen_ai.usage.cache_read.input_tokens", sum(choice.cached_tokens for choice in choices)
    yield "engine.retractions", sum(choice.num_retractions for choice in choices)
