"""Traces of a real server: a client's trace goes on in the engine."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from tests.tokenizer_manager.telemetry.collector import Collector

from .conftest import StartServe, openai_client
from .serving import DEADLINE_S

pytestmark = pytest.mark.real_process

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 3}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.slow
def test_a_clients_trace_goes_on_in_the_engine(start_serve: StartServe, model):
    with Collector() as collector:
        engine = start_serve(
            str(model), "--dtype", "float32", "--otlp-endpoint", collector.url
        ).wait_until_ready()
        client: openai.OpenAI = openai_client(engine)
        answer = client.completions.create(
            model=engine.model,
            prompt="one two three",
            max_tokens=8,
            extra_body={"ignore_eos": True, "json_schema": json.dumps(SCHEMA)},
            extra_headers={"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"},
        )
        httpx.get(f"{engine.url}/health", timeout=DEADLINE_S)
        assert engine.stop() == 0, engine.log
        assert engine.leftovers() == []

    spans = {span.name: span for span in collector.spans}
    root = spans.pop(f"text_completion {engine.model}")
    assert (root.trace_id, root.parent_id) == (TRACE_ID, SPAN_ID)
    assert root.attributes["gen_ai.response.id"] == answer.id
    assert answer.usage is not None
    assert root.attributes["gen_ai.usage.input_tokens"] == answer.usage.prompt_tokens
    assert root.attributes["gen_ai.usage.output_tokens"] == answer.usage.completion_tokens
    assert set(spans) == {"receive", "tokenize", "grammar", "queue", "prefill", "decode", "send"}
    for span in spans.values():
        assert (span.trace_id, span.parent_id) == (TRACE_ID, root.span_id)
        assert root.start_ns <= span.start_ns <= span.end_ns <= root.end_ns, span.name
    assert spans["queue"].end_ns <= spans["prefill"].end_ns <= spans["decode"].end_ns


@pytest.mark.slow
def test_a_collector_that_is_away_delays_neither_answers_nor_the_end(start_serve: StartServe, model):
    engine = start_serve(str(model), "--dtype", "float32", "--otlp-endpoint", "http://127.0.0.1:9")
    client = openai_client(engine.wait_until_ready())
    for _ in range(3):
        client.completions.create(model=engine.model, prompt="one", max_tokens=2)

    assert engine.stop() == 0, engine.log
    assert engine.leftovers() == []
