"""A prompt that begins with the BOS that tokenization adds is warned of in every endpoint that tokenizes."""

from __future__ import annotations

from typing import Any

import pytest

from ..conftest import Serve
from ..fake_engine import ids_of, make_tokenizer, say_all

WITH_BOS = make_tokenizer(adds_bos=True)
TWICE = "<|im_start|>a"
FIX = "send add_special_tokens: false"


def warnings_of(serve: Serve, path: str, body: dict[str, Any]) -> list[str]:
    reply = serve(say_all("x"), tokenizer=WITH_BOS).client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    warnings: list[str] = reply.json().get("warnings", [])
    return warnings


@pytest.mark.parametrize(
    ("path", "body", "param", "fix"),
    [
        ("/v1/completions", {"prompt": TWICE}, "prompt", FIX),
        ("/v1/completions", {"prompt": ["a", TWICE]}, "prompt[1]", FIX),
        ("/generate", {"text": TWICE}, "text", FIX),
        ("/tokenize", {"prompt": TWICE}, "prompt", FIX),
        (
            "/api/generate",
            {"prompt": TWICE, "raw": True, "stream": False},
            "prompt",
            "leave it out of the prompt",
        ),
    ],
)
def test_a_second_bos(serve: Serve, path: str, body: dict[str, Any], param: str, fix: str):
    text = f"{param} begins with <|im_start|>, and tokenization adds another one; {fix}"
    assert warnings_of(serve, path, body) == [text]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": TWICE, "add_special_tokens": False}),
        ("/v1/completions", {"prompt": [256, 256, 5]}),
        ("/generate", {"text": TWICE, "add_special_tokens": False}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),  # the template has it
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_one_bos_is_no_reason_to_warn(serve: Serve, path: str, body: dict[str, Any]):
    assert warnings_of(serve, path, body) == []


def test_the_first_event_of_a_stream_has_the_warning(serve: Serve):
    body = {"prompt": TWICE, "stream": True}
    text = serve(say_all("x"), tokenizer=WITH_BOS).client.post("/v1/completions", json=body).text

    assert "begins with <|im_start|>" in text.split("\n\n")[0]


def test_generate_has_the_switch(serve: Serve):
    served = serve(say_all("x"), tokenizer=WITH_BOS)
    served.client.post("/generate", json={"text": "a", "add_special_tokens": False})
    served.client.post("/generate", json={"text": "a"})

    assert [ids_of(served.engine.next_request()) for _ in range(2)] == [
        WITH_BOS.encode("a", add_special_tokens=False),
        WITH_BOS.encode("a"),
    ]
