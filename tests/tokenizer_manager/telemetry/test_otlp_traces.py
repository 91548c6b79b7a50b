"""Spans of requests, as a collector gets them."""

from __future__ import annotations

import builtins
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import AsyncMock

import pytest

from engine.runtime.config.server_config import LogConfig
from engine.runtime.errors import ConfigError
from engine.tokenizer_manager.http.exchange import Exchange
from engine.tokenizer_manager.telemetry.otlp_traces import OtlpTraces, _OncePerMinute, make_traces, traces_url
from engine.tokenizer_manager.telemetry.request_record import NoTraces

from ..conftest import Serve, Served
from ..fake_engine import LENGTH, MODEL, WAIT_S, FakeClock, row, say_all
from .collector import Collector, Span

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ERROR = 2


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


def completion(served: Served, headers: dict[str, str] | None = None, **fields: Any) -> None:
    reply = served.client.post("/v1/completions", json={"prompt": "hi", **fields}, headers=headers)
    assert reply.status_code == 200, reply.text


def flush(served: Served) -> None:
    """Send what has ended. The answer to a later request comes after the end of every answered one."""
    served.client.get("/health")
    served.services.traces.close()


def spans(served: Served, collector: Collector) -> dict[str, Span]:
    """The spans of the only request, by name."""
    flush(served)
    assert len({span.trace_id for span in collector.spans}) == 1
    found = {span.name: span for span in collector.spans}
    assert len(found) == len(collector.spans)
    return found


def test_a_request_is_a_span_with_one_for_each_part_of_its_life(serve: Serve, collector: Collector):
    clock = FakeClock()
    served = serve(clock=clock, traces=OtlpTraces(traces_url(collector.url), MODEL))
    waiting = served.post_later("/v1/completions", json={"prompt": "hello", "stream": False})
    request = served.engine.next_request()
    clock.now_s += 2.0
    served.engine.say(row(request, "a", total=1, cached=2))
    while served.services.manager.request_log.ttft_s(request.rid) is None:  # until the row is there
        served.client.get("/health")
    clock.now_s += 3.0
    served.engine.say(row(request, "bc", total=3, cached=2, finish=LENGTH))
    assert waiting.result(WAIT_S).status_code == 200

    found = spans(served, collector)
    root = found.pop(f"text_completion {MODEL}")
    assert set(found) == {"receive", "tokenize", "queue", "prefill", "decode", "send"}
    assert {span.parent_id for span in found.values()} == {root.span_id}
    assert (root.parent_id, root.kind, root.status) == ("", 2, 0)  # a server's, and no error
    lengths = {name: round(span.seconds, 6) for name, span in found.items()}
    assert lengths == {"receive": 0, "tokenize": 0, "queue": 0.25, "prefill": 1.75, "decode": 3, "send": 0}
    assert found["decode"].start_ns == found["prefill"].end_ns
    assert found["prefill"].start_ns == found["queue"].end_ns
    assert round(root.seconds, 6) == 5
    attributes = dict(root.attributes)
    assert attributes.pop("gen_ai.response.id").startswith("cmpl-")
    assert attributes.pop("engine.request_id")
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "engine",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "engine.retractions": 0,
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
    }
    [(name, when_ns, facts)] = root.events
    assert (name, facts) == ("first token", {"gen_ai.server.time_to_first_token": 2.0, "engine.choice": 0})
    assert when_ns == found["prefill"].end_ns
    assert root.resource["service.name"] == "engine"
    assert collector.paths == ["/v1/traces"]


def test_it_continues_the_trace_of_the_client(serve: Serve, collector: Collector):
    served = serve(say_all("x"), traces=OtlpTraces(traces_url(collector.url), MODEL))
    completion(served, {"traceparent": TRACEPARENT, "tracestate": "a=b"})

    found = spans(served, collector)
    root = found[f"text_completion {MODEL}"]
    assert (root.trace_id, root.parent_id) == ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
    assert {(span.trace_id, span.trace_state) for span in found.values()} == {(root.trace_id, "a=b")}


@pytest.mark.parametrize("header", ["", "garbage", "00-0-0-00", "ff-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_wrong_context_of_the_client_is_ignored(serve: Serve, collector: Collector, header):
    served = serve(say_all("x"), traces=OtlpTraces(traces_url(collector.url), MODEL))
    completion(served, {"traceparent": header})

    assert spans(served, collector)[f"text_completion {MODEL}"].parent_id == ""


def test_a_client_that_does_not_want_a_trace_gets_none(serve: Serve, collector: Collector):
    served = serve(say_all("x"), traces=OtlpTraces(traces_url(collector.url), MODEL))
    completion(served, {"traceparent": TRACEPARENT.removesuffix("01") + "00"})
    flush(served)

    assert collector.spans == []


def test_each_choice_has_its_own_parts(serve: Serve, collector: Collector):
    served = serve(say_all("x"), traces=OtlpTraces(traces_url(collector.url), MODEL))
    completion(served, n=3)
    flush(served)

    decodes = [span for span in collector.spans if span.name == "decode"]
    assert sorted(span.attributes["engine.choice"] for span in decodes) == [0, 1, 2]
    [root] = [span for span in collector.spans if span.name.endswith(MODEL)]
    assert root.attributes["gen_ai.usage.output_tokens"] == 3
    assert len(root.events) == 3


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"])
def test_a_chat_is_one_in_every_api(serve: Serve, collector: Collector, path):
    served = serve(say_all("x"), traces=OtlpTraces(traces_url(collector.url), MODEL))
    messages = [{"role": "user", "content": "secret"}]
    body = {"model": MODEL, "max_tokens": 4, "messages": messages, "input": "secret", "stream": False}
    assert served.client.post(path, json=body).status_code == 200

    found = spans(served, collector)
    assert found[f"chat {MODEL}"].attributes["http.route"] == path
    assert "secret" not in str(collector.spans)


def test_a_refused_request_is_an_error_with_its_code(serve: Serve, collector: Collector):
    served = serve(traces=OtlpTraces(traces_url(collector.url), MODEL))
    assert served.client.post("/v1/completions", json={}).status_code == 400

    found = spans(served, collector)
    root = found.pop(f"text_completion {MODEL}")
    assert (root.status, root.attributes["http.response.status_code"]) == (ERROR, 400)
    assert root.attributes["error.type"] == "missing_field"
    assert set(found) == {"receive"}


def test_a_stream_that_fails_is_an_error(serve: Serve, collector: Collector):
    served = serve(traces=OtlpTraces(traces_url(collector.url), MODEL))
    waiting = served.post_later("/v1/completions", json={"prompt": "hi", "stream": True})
    request = served.engine.next_request()
    served.engine.say(row(request, "a", total=1))
    served.engine.loop.call_soon_threadsafe(served.services.manager.engine_died, "over")  # type: ignore[union-attr]
    waiting.result(WAIT_S)

    root = spans(served, collector)[f"text_completion {MODEL}"]
    assert (root.status, root.attributes["error.type"]) == (ERROR, "engine_dead")


def test_other_requests_have_no_spans(serve: Serve, collector: Collector):
    served = serve(traces=OtlpTraces(traces_url(collector.url), MODEL))
    for path in ("/health", "/metrics", "/v1/models", "/nothing"):
        served.client.get(path)
    flush(served)

    assert collector.spans == []


@pytest.mark.parametrize("status", [None, 400, 503], ids=["nothing listens", "refuses", "is overloaded"])
def test_a_collector_that_fails_costs_no_request_anything(serve: Serve, caplog, status):
    with socket.create_server(("127.0.0.1", 0)) as closed, Collector(status or 200) as collector:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}" if status is None else collector.url
        if status is None:
            closed.close()
        served = serve(say_all("x"), traces=OtlpTraces(traces_url(url), MODEL))
        for _ in range(3):
            completion(served)
        with caplog.at_level(logging.WARNING):
            served.services.traces.close()
        completion(served)


def test_failures_of_a_collector_are_logged_once_a_minute():
    once = _OncePerMinute()

    def shown(level: int, created_s: float) -> bool:
        record = logging.makeLogRecord({"levelno": level, "created": created_s})
        return bool(once.filter(record))

    assert [shown(logging.WARNING, created_s) for created_s in (0.0, 1.0, 59.0, 60.0, 61.0)] == [
        *(True, False, False),
        *(True, False),
    ]
    assert shown(logging.INFO, 62.0)


def test_more_requests_than_can_be_traced_are_counted(caplog, monkeypatch):
    monkeypatch.setattr("engine.tokenizer_manager.telemetry.otlp_traces._WAITING_RECORDS", 1)
    monkeypatch.setattr("engine.tokenizer_manager.telemetry.otlp_traces.OtlpTraces._run", lambda self: None)
    traces = OtlpTraces("http://127.0.0.1:9/v1/traces", MODEL)

    scope = {"method": "POST", "path": "/generate", "headers": []}
    exchange = Exchange(scope, AsyncMock(), AsyncMock())
    for _ in range(3):
        traces.ended(exchange, 1.0)
    assert traces._num_lost == 2


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://a:4318", "http://a:4318/v1/traces"),
        ("http://a:4318/", "http://a:4318/v1/traces"),
        ("https://a/otlp", "https://a/otlp/v1/traces"),
        ("http://a:4318/v1/traces", "http://a:4318/v1/traces"),
    ],
)
def test_the_path_of_otlp_is_added(endpoint, url):
    assert traces_url(endpoint) == url


@pytest.mark.parametrize("endpoint", ["", "a:4318", "grpc://a:4317"])
def test_an_endpoint_is_a_url(endpoint):
    with pytest.raises(ConfigError, match="must be an http:// or https:// URL"):
        LogConfig(otlp_endpoint=endpoint)


def test_without_an_endpoint_there_are_no_traces():
    assert isinstance(make_traces(None, MODEL), NoTraces)


def test_the_variables_of_opentelemetry_are_enough(serve: Serve, collector: Collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20key")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-eu")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    served = serve(say_all("x"), traces=make_traces(None, MODEL))
    completion(served)

    root = spans(served, collector)[f"text_completion {MODEL}"]
    assert (root.resource["service.name"], root.resource["deployment.environment"]) == ("chat-eu", "test")
    assert collector.headers[0]["authorization"] == "Bearer key"
    assert collector.paths == ["/v1/traces"]


@pytest.fixture
def without_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)


@pytest.mark.usefixtures("without_extra")
def test_without_the_extra_the_flag_is_an_error_with_the_command():
    with pytest.raises(ConfigError, match="pip install opentelemetry-sdk opentelemetry-exporter"):
        make_traces("http://127.0.0.1:4318", MODEL)


@pytest.mark.usefixtures("without_extra")
def test_without_the_extra_a_variable_is_a_warning(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    assert isinstance(make_traces(None, MODEL), NoTraces)
    assert "pip install opentelemetry-sdk" in caplog.text


def test_without_an_endpoint_opentelemetry_is_not_imported():
    code = (
        "import sys, engine.tokenizer_manager.process as process\n"
        "process.make_traces(None, 'm')\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_S)
