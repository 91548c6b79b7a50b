"""`OtlpTraces`: sends the spans of each request to an OpenTelemetry collector, over OTLP with HTTP.

The event loop only copies a request's times when its response has ended. A thread makes the spans, and one of the SDK
sends them in batches: a collector that is slow or gone costs spans, never requests. OpenTelemetry is imported here, and
only if a collector is set.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from typing import TYPE_CHECKING, Final

from ...runtime.errors import ConfigError
from ...runtime.version import __version__
from .request_record import NoTraces, RequestRecord, TracedExchange, Traces, record_of
from .span_tree import OPERATIONS, write_spans

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger(__name__)

_PATH: Final = "/v1/traces"
_WAITING_RECORDS: Final = 4096
_CLOSE_S: Final = 1.0
_QUIET_S: Final = 60.0
_INSTALL: Final = "install it: pip install 'engine[otel]'"


def make_traces(endpoint: str | None, model: str) -> Traces:
    """What takes the requests that have ended.

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
