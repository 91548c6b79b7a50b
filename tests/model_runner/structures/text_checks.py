"""The check of a tiny model against transformers that tests of single families share with the contract of all."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from engine.runtime.sampling_params import SamplingParams
from tests.model_runner.conftest import Driver, TinyModel


def tokens_of(length: int, seed: int = 0, vocab: int = 96) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(vocab) for _ in range(length)]


def check_prefill_and_decode(tiny: TinyModel, driver: Driver, unpack: Any, length: int = 150) -> None:
    """Log-probabilities of a prompt and of the token after it, and greedy tokens."""
    prompt = tokens_of(length)
    req = driver.start(prompt, SamplingParams(temperature=0.0, logprobs=5, prompt_logprobs=5))
    expected = tiny.logprobs(prompt)
    result = driver.step([(req, length)])
    assert result.prompt_logprobs is not None
    token, top_ids, top = unpack(result.prompt_logprobs[0])
    np.testing.assert_allclose(token, expected[torch.arange(length - 1), prompt[1:]], atol=2e-4)
    np.testing.assert_allclose(top, expected[:-1].topk(5).values, atol=2e-4)
    assert (top_ids == expected[:-1].topk(5).indices.numpy()).mean() > 0.99
    token, _, top = unpack(result.logprobs[0])
    np.testing.assert_allclose(top[0], expected[-1].topk(5).values, atol=2e-4)
    assert token[0] == top[0, 0]
    while len(req.output) < 20:
        driver.step([(req, 1)])
    assert tiny.logprobs(prompt + req.output)[length - 1 : -1].argmax(-1).tolist() == req.output
