"""Names of the served model in requests: built-in names, and any with `--served-model-name '*'`."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import pytest

from engine.runtime.config.engine_config import ModelConfig
from engine.tokenizer_manager.http.app import App

from ..fake_engine import MODEL, FakeEngine, make_services, say_all
from .calling import Reply, call

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/messages": {"messages": HI, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/responses": {"input": "hi"},
    "/api/chat": {"messages": HI, "stream": False},
}


def post(path: str, *, any_name: bool) -> Reply:
    async def run() -> Reply:
        services = dataclasses.replace(make_services(FakeEngine(say_all("x"))), any_model_name=any_name)
        return await call(App(services), path, BODIES[path] | {"model": "other"})

    return asyncio.run(run())


@pytest.mark.parametrize("path", BODIES)
def test_any_name_is_accepted(path: str):
    assert post(path, any_name=True).status == 200
    assert post(path, any_name=False).status == 404


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("served", "asked", "status"),
    [
        ("llama", "llama:latest", 200),
        ("llama:latest", "llama", 200),
        ("org/llama", "org/llama:latest", 200),
        ("llama", "llama:8b", 404),
        ("llama:8b", "llama:latest", 404),
        ("llama", "other:latest", 404),
    ],
)
def test_a_name_without_a_tag_has_the_tag_latest_as_in_ollama(
    path: str, served: str, asked: str, status: int
):
    async def run() -> Reply:
        services = dataclasses.replace(make_services(FakeEngine(say_all("x"))), served_model=served)
        return await call(App(services), path, BODIES[path] | {"model": asked})

    assert asyncio.run(run()).status == status


def test_openai_answers_have_the_real_name():
    assert json.loads(post("/v1/responses", any_name=True).body)["model"] == MODEL


def test_the_models_own_name_is_listed():
    config = ModelConfig(served_model_name="*")

    assert config.takes_any_name
    assert config.name_in_api("org/real") == "org/real"
    assert ModelConfig(served_model_name="m").name_in_api("org/real") == "m"
    assert ModelConfig().name_in_api("org/real") == "org/real"
    assert not ModelConfig().takes_any_name


@pytest.mark.parametrize(
    ("name", "served", "is_same"),
    [
        ("SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct", True),
        ("smollm2", "SmolLM2-135M-Instruct", True),
        ("SmolLM2-135M", "SmolLM2-135M-Instruct", True),
        ("default", "SmolLM2-135M-Instruct", True),
        ("smollm2", "other", False),
        ("default", "m", False),
        ("qwen3-0.6b", "Qwen/Qwen3-0.6B", True),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", True),
        ("qwen3-8b", "Qwen/Qwen3-0.6B", False),
        ("gpt-4", "SmolLM2-135M-Instruct", False),
    ],
)
def test_a_built_in_name_names_its_model(name: str, served: str, is_same: bool):
    async def run() -> Reply:
        services = dataclasses.replace(make_services(FakeEngine(say_all("x"))), served_model=served)
        return await call(App(services), "/api/chat", BODIES["/api/chat"] | {"model": name})

    assert asyncio.run(run()).status == (200 if is_same else 404)
