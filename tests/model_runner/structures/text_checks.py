"""Checks of a tiny model against transformers that the tests of several families share."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.models.gguf.gguf_file import GGUFFile
from engine.models.gguf_config import read_gguf_spec
from engine.models.weight_files.check_weights import check_gguf_weights
from engine.models.weight_files.weight_memory import num_parameters
from engine.runtime.sampling_params import SamplingParams
from tests.model_runner.conftest import Driver, TinyModel


def tokens_of(length: int, seed: int = 0, vocab: int = 96) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(vocab) for _ in range(length)]


def check_prefill_and_decode(
    tiny: TinyModel, driver: Driver, unpack: Any, length: int = 150, atol: float = 1e-4
) -> None:
    """Log-probabilities of a prompt and of the token after it, and greedy tokens."""
    prompt = tokens_of(length)
    req = driver.start(prompt, SamplingParams(temperature=0.0, logprobs=5, prompt_logprobs=5))
    expected = tiny.logprobs(prompt)
    result = driver.step([(req, length)])
    assert result.prompt_logprobs is not None
    token, top_ids, top = unpack(result.prompt_logprobs[0])
    np.testing.assert_allclose(token, expected[torch.arange(length - 1), prompt[1:]], atol=atol)
    np.testing.assert_allclose(top, expected[:-1].topk(5).values, atol=atol)
    assert (top_ids == expected[:-1].topk(5).indices.numpy()).mean() > 0.99
    token, _, top = unpack(result.logprobs[0])
    np.testing.assert_allclose(top[0], expected[-1].topk(5).values, atol=atol)
    assert token[0] == top[0, 0]
    while len(req.output) < 20:
        driver.step([(req, 1)])
    assert tiny.logprobs(prompt + req.output)[length - 1 : -1].argmax(-1).tolist() == req.output


def check_gguf_file(tiny: TinyModel, path: Path, make_driver: Callable[..., Driver]) -> None:
    """A file holds the tensors that are needed, as many numbers as the model, and gives its greedy tokens."""
    file = GGUFFile(path)
    spec = read_gguf_spec(file)
    check_gguf_weights(file, spec)
    assert num_parameters(spec) == num_parameters(tiny.spec)
    driver = make_driver(spec, path, kind="gguf")
    assert driver.generate([tokens_of(40)], num=12)[0] == tiny.greedy(tokens_of(40), 12)
