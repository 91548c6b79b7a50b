"""The default model: the same greedy text as transformers, which reads and dequantizes the GGUF file by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from engine.models.hub.built_in.fetch import ensure_model
from engine.models.load_spec import load_spec
from engine.models.source import ModelSource
from engine.models.tokenizer.tokenizer import load_tokenizer
from engine.runtime.sampling_params import SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

NUM_TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "The three laws of thermodynamics are",
    "<|im_start|>user\nWhat is a radix tree?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
    "1, 1, 2, 3, 5, 8, 13,",
    "Die Hauptstadt von Deutschland ist",
]


@pytest.fixture(scope="module")
def model_path() -> Path:
    return ensure_model()


@pytest.fixture(scope="module")
def source(model_path: Path) -> ModelSource:
    return ModelSource("gguf", str(model_path), "SmolLM2-135M-Instruct")


@pytest.fixture(scope="module")
def prompts(source: ModelSource) -> list[list[int]]:
    tokenizer = load_tokenizer(source)
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def reference(model_path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        model_path.parent, gguf_file=model_path.name, dtype=torch.float32
    ).eval()


@pytest.fixture
def driver(make_driver: Any, source: ModelSource) -> Any:
    return make_driver(load_spec(source), Path(source.path), kind="gguf", page_size=16, max_model_len=1024)


@torch.inference_mode()
def test_greedy_text_is_that_of_transformers(driver, reference, prompts):
    """Given our text, transformers would have chosen each of its tokens: one pass instead of one per token."""
    outputs = driver.generate(prompts, SamplingParams(temperature=0.0), num=NUM_TOKENS)
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = reference(torch.tensor([prompt + output])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == output


@torch.inference_mode()
def test_logprobs_are_those_of_transformers(driver, reference, prompts, unpack):
    text = [token for prompt in prompts for token in prompt]
    logprobs = reference(torch.tensor([text])).logits[0].log_softmax(-1)
    req = driver.start(text, SamplingParams(temperature=0.0, prompt_logprobs=20))
    token, top_ids, top = unpack(driver.step([(req, len(text))]).prompt_logprobs[0])
    np.testing.assert_allclose(token, logprobs[torch.arange(len(text) - 1), text[1:]], atol=2e-3)
    np.testing.assert_allclose(top, logprobs[:-1].topk(20).values, atol=2e-3)
    assert (top_ids == logprobs[:-1].topk(20).indices.numpy()).mean() > 0.98


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(temperature=0.0), SamplingParams(temperature=0.7, top_p=0.9)],
    ids=["greedy", "seeded"],
)
def test_a_request_gives_the_same_alone_in_a_batch_chunked_and_after_retraction(driver, prompts, sampling):
    mine = replace(sampling, seed=5, max_new_tokens=32)
    prompt = prompts[4] + prompts[2] + prompts[3]
    alone = driver.generate([prompt], mine, num=32)[0]

    others = [replace(mine, seed=n, temperature=n % 3 / 2) for n in range(31)]
    many = driver.generate([*(prompts * 4)[:31], prompt], [*others, mine], num=32)
    assert many[31] == alone
    assert driver.generate([prompt], mine, num=32, chunk=7)[0] == alone
    again = driver.start(prompt + alone[:11], mine, prompt_len=len(prompt))
    while len(again.output) < 32:
        driver.step([(again, len(again.tokens) - again.computed)])
    assert again.output == alone
