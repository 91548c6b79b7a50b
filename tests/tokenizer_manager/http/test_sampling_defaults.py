"""The model's sampling defaults reach every endpoint, and a request's own value has precedence."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import asdict

from engine.runtime.sampling_defaults import NAMES, OPENAI_DEFAULTS, SamplingDefaults

from ..conftest import Serve
from ..fake_engine import say_all

OF_MODEL = SamplingDefaults(
    temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.1, source="generation_config.json"
)
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
HI = [{"role": "user", "content": "hi"}]
OLLAMA_NAMES = {"repetition_penalty": "repeat_penalty"}


def flat(body: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    return body | fields


def anthropic(fields: dict[str, Any]) -> dict[str, Any]:
    body = {"messages": HI, "max_tokens": 5}
    return body | {name: value for name, value in fields.items() if name in ("temperature", "top_k", "top_p")}


def ollama(body: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    return body | {"options": {OLLAMA_NAMES.get(name, name): value for name, value in fields.items()}}


ENDPOINTS = {
    "/v1/chat/completions": lambda fields: flat({"messages": HI}, fields),
    "/v1/completions": lambda fields: flat({"prompt": "hi"}, fields),
    "/v1/responses": lambda fields: flat({"input": "hi"}, fields),
    "/v1/messages": anthropic,
    "/generate": lambda fields: {"text": "hi", "sampling_params": fields},
    "/api/chat": lambda fields: ollama({"messages": HI, "stream": False}, fields),
    "/api/generate": lambda fields: ollama({"prompt": "hi", "stream": False}, fields),
}


def sampled(serve: Serve, path: str, fields: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """What the scheduler is told, of the parameters that have defaults."""
    served = serve(say_all("x"), of_model=OF_MODEL, **settings)
    reply = served.client.post(path, json=ENDPOINTS[path](fields))
    assert reply.status_code == 200, reply.text
    params = asdict(served.engine.next_request().sampling)
    return {name: params[name] for name in NAMES}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_request_without_values_has_the_models(serve: Serve, path: str):
    assert sampled(serve, path, {}) == OF_MODEL.values()


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_request_with_null_has_the_models(serve: Serve, path: str):
    assert sampled(serve, path, dict.fromkeys(NAMES)) == OF_MODEL.values()


@pytest.mark.parametrize("path", ENDPOINTS)
def test_values_without_an_effect_have_precedence_too(serve: Serve, path: str):
    expected = dict(NEUTRAL)
    if path == "/v1/messages":  # has no fields for these
        expected |= {"min_p": 0.1, "repetition_penalty": 1.1}
    assert sampled(serve, path, NEUTRAL) == expected


@pytest.mark.parametrize("path", ENDPOINTS)
def test_with_the_setting_openai_the_models_do_not_count(serve: Serve, path: str):
    params = asdict(OPENAI_DEFAULTS.params())
    expected = {name: params[name] for name in NAMES}
    assert sampled(serve, path, {}, model={"sampling_defaults": "openai"}) == expected


def test_clients_can_read_them(serve: Serve):
    client = serve(of_model=OF_MODEL).client

    [model] = client.get("/v1/models").json()["data"]
    assert model["sampling_defaults"] == OF_MODEL.values() | {"source": "generation_config.json"}
    for kind in ("ChatRequest", "CompletionRequest", "NativeSampling"):
        fields = client.get("/openapi.json").json()["components"]["schemas"][kind]["properties"]
        assert {name: fields[name]["default"] for name in NAMES} == OF_MODEL.values()
    shown = client.post("/api/show", json={}).json()["parameters"]
    assert dict(line.split() for line in shown.splitlines()) == {
        OLLAMA_NAMES.get(name, name): f"{value:g}" for name, value in OF_MODEL.values().items()
    }


@pytest.mark.parametrize("path", ["/generate", "/api/chat", "/api/generate"])
def test_apis_other_than_openais_have_the_engines_range_of_temperatures(serve: Serve, path: str):
    assert sampled(serve, path, {"temperature": 50})["temperature"] == 50


@pytest.mark.parametrize("path", [path for path in ENDPOINTS if path.startswith("/v1/")])
def test_a_temperature_above_2_is_refused_in_v1(serve: Serve, path: str):
    reply = serve(say_all("x")).client.post(path, json=ENDPOINTS[path]({"temperature": 2.5}))

    assert reply.status_code == 400
    assert "temperature is 2.5, but it must lie in [0, 2]" in reply.json()["error"]["message"]
