"""`OtlpTraces`: sends the spans of each request to an OpenTelemetry collector, over OTLP with HTTP.

The event loop only copies a request's times when its response has ended. A thread makes the spans, and one of the SDK
sends them in batches: a collector that is slow or gone costs spans, never requests. OpenTelemetry is imported here, and
only if a collector is set. `write_spans` makes the tree of spans of one request.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from ...runtime.errors import ConfigError
from ...runtime.installation import __version__
from .request_record import (
    ChoiceRecord,
    GenerationRecord,
    NoTraces,
    RequestRecord,
    TracedExchange,
    Traces,
    record_of,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer
    from opentelemetry.util.types import AttributeValue

logger = logging.getLogger(__name__)

_PATH: Final = "/v1/traces"
_WAITING_RECORDS: Final = 4096
_CLOSE_S: Final = 1.0
_QUIET_S: Final = 60.0
_INSTALL: Final = "install it: pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"


def make_traces(endpoint: str | None, model: str) -> Traces:
    """The receiver of ended requests.

    Args:
        endpoint: URL of a collector; None: that of OpenTelemetry's own variables, or none.
        model: the served name.

    Raises:
        ConfigError: there is an endpoint, and OpenTelemetry's SDK is not installed.
    """
    variables = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    named = next((name for name in variables if os.environ.get(name)), "")
    if endpoint is None and not named:
        return NoTraces()
    try:
        return OtlpTraces(None if endpoint is None else traces_url(endpoint), model)
    except ImportError as error:
        if endpoint is not None:
            raise ConfigError(
                f"otlp_endpoint is set, but OpenTelemetry cannot be imported ({error}); {_INSTALL}"
            ) from None
        logger.warning("no traces, although %s is set: %s; %s", named, error, _INSTALL)
        return NoTraces()


def traces_url(endpoint: str) -> str:
    """The URL that spans are posted to: a collector's URL without a path of its own gets that of OTLP."""
    return endpoint if endpoint.endswith(_PATH) else endpoint.rstrip("/") + _PATH


class OtlpTraces:
    """See the module."""

    def __init__(self, url: str | None, model: str) -> None:
        """Start the threads.

        Args:
            url: that spans are posted to; None: the exporter reads its variables.
            model: the served name.

        Raises:
            ImportError: OpenTelemetry's SDK is not installed.
        """
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # The process ends without waiting for a collector: `close` does that, for a second.
        self._provider: TracerProvider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer("engine", __version__)
        self._model = model
        self._records: queue.Queue[RequestRecord | None] = queue.Queue(_WAITING_RECORDS)
        self._num_lost = 0
        _say_failures_once_a_minute()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()
        logger.info("traces=on url=%s", url or "(from OTEL_ variables)")

    def ended(self, exchange: TracedExchange, now_s: float) -> None:
        if exchange.path not in OPERATIONS:
            return
        try:
            self._records.put_nowait(record_of(exchange, now_s))
        except queue.Full:
            self._num_lost += 1

    def close(self) -> None:
        try:
            self._records.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(_CLOSE_S)
        if self._num_lost:
            logger.warning("traces lost=%d: requests ended faster than their spans were made", self._num_lost)

    def _run(self) -> None:
        while (record := self._records.get()) is not None:
            try:
                write_spans(self._tracer, record, self._model)
            except Exception:  # one trace, not all later ones
                logger.warning("no trace of request_id=%s", record.request_id, exc_info=True)
        self._provider.force_flush(int(_CLOSE_S * 1000))


def _resource() -> Resource:
    """The resource of OpenTelemetry's variables; the service is called `engine` if they do not name it."""
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource

    resource = Resource.create({SERVICE_VERSION: __version__})
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "engine"}))
    return resource


class _OncePerMinute(logging.Filter):
    """Lets one record through, and no other for a minute: a collector that is away fails each batch."""

    def __init__(self) -> None:
        super().__init__()
        self._next_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        if record.created < self._next_s:
            return False
        self._next_s = record.created + _QUIET_S
        record.exc_info = record.exc_text = None  # the message has the cause
        return True


def _say_failures_once_a_minute() -> None:
    once = _OncePerMinute()
    for name in (
        "opentelemetry.exporter.otlp.proto.http.trace_exporter",
        "opentelemetry.exporter.otlp.proto.http",
        "opentelemetry.sdk._shared_internal",
        "opentelemetry.sdk.trace.export",
    ):
        logging.getLogger(name).addFilter(once)


OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/infill": "text_completion",
    "/completion": "text_completion",
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
    """Make the spans of a request, ended.

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
