"""`Collector`: stands in for an OpenTelemetry collector on a loopback port, and decodes what it gets."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


class Span(NamedTuple):
    """A span as it arrived; times in ns since 1970."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    trace_state: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, int, dict[str, Any]]]
    status: int
    resource: dict[str, Any]

    @property
    def seconds(self) -> float:
        """Its length."""
        return (self.end_ns - self.start_ns) / 1e9


class Collector:
    """A context manager.

    Attributes:
        url: to give to `--otlp-endpoint`.
        spans: that have arrived.
        paths: of the requests.
        status: of its answers.
    """

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.spans: list[Span] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.take(self.path, dict(self.headers.items()), body)
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        """Decode a request."""
        self.paths.append(path)
        self.headers.append({name.lower(): value for name, value in headers.items()})
        if self.headers[-1].get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        for batch in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = {each.key: _value(each.value) for each in batch.resource.attributes}
            for scope in batch.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        Span(
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.trace_state,
                            span.kind,
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            {each.key: _value(each.value) for each in span.attributes},
                            [
                                (
                                    each.name,
                                    each.time_unix_nano,
                                    {a.key: _value(a.value) for a in each.attributes},
                                )
                                for each in span.events
                            ],
                            span.status.code,
                            resource,
                        )
                    )


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, str(kind))
