"""A folder with a vision tower: its text is served, and a request with an image is refused in every API."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from .serving import EngineServe

pytestmark = pytest.mark.real_process
IMAGE = "data:image/png;base64,iVBORw0KGgo="
MEDIA: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}]},
        "messages[0].content[0].type",
    ),
    "messages": (
        "/v1/messages",
        {
            "max_tokens": 4,
            "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "base64"}}]}],
        },
        "messages[0].content[0].type",
    ),
    "responses": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]}]},
        "input[0].content[0].type",
    ),
    "ollama": (
        "/api/chat",
        {"messages": [{"role": "user", "content": "What is it?", "images": ["iVBORw0KGgo="]}]},
        "messages[0].images",
    ),
}


@pytest.fixture
def model_with_tower(model_copy: Path) -> Path:
    """The small Llama as the language model of a LLaVA."""
    import torch
    from safetensors.torch import load_file, save_file

    path = model_copy / "config.json"
    config = {"model_type": "llava", "vision_config": {"hidden_size": 8}}
    path.write_text(json.dumps(config | {"text_config": json.loads(path.read_text())}))
    weights = model_copy / "model.safetensors"
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(weights).items()}
    save_file({**tensors, "vision_tower.embeddings.weight": torch.ones(512, 1024)}, weights)
    return model_copy


@pytest.mark.slow
def test_text_is_served_and_images_are_refused(
    model_with_tower: Path, serve: EngineServe, start_serve: Callable[..., EngineServe]
) -> None:
    engine = start_serve(str(model_with_tower), "--dtype", "float32", "--language-model-only")
    engine.wait_until_ready()
    body = {"prompt": "the quick brown", "max_tokens": 12, "temperature": 0}

    texts = [
        httpx.post(f"{each.url}/v1/completions", json={"model": each.model, **body}).json()["choices"][0][
            "text"
        ]
        for each in (engine, serve)
    ]

    assert texts[0] == texts[1] != ""
    for path, request, param in MEDIA.values():
        answer = httpx.post(f"{engine.url}{path}", json={"model": engine.model, **request})
        assert answer.status_code == 400, answer.text
        assert param in answer.text and "the engine serves only the text of this model" in answer.text
    assert engine.stop() == 0
    assert (
        "serves only the text of this llava model; 1 tensor of its towers, 2 MiB, are not read" in engine.log
    )


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("outer", "inner", "cause"),
    [
        ({"text_config": None}, {}, "text_config is None, expected an object"),
        ({"model_type": "seer"}, {}, "model_type is 'seer' with a text_config"),
        (
            {},
            {"model_type": "novel"},
            "the engine has no model for novel of its own, and transformers cannot",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(
    model_with_tower: Path,
    start_serve: Callable[..., EngineServe],
    outer: dict[str, Any],
    inner: dict[str, Any],
    cause: str,
) -> None:
    path = model_with_tower / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"text_config": config["text_config"] | inner} | outer))

    engine = start_serve(str(model_with_tower))

    assert engine.wait() == 2
    assert [cause in line for line in engine.causes] == [True], engine.log
