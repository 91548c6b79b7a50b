"""Our Llama against transformers' on tiny random models: log-probabilities of every position, and greedy output."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from engine.runtime.sampling_params import SamplingParams

SHAPES: dict[str, dict[str, Any]] = {
    "group of 3": {},
    "multi-head": {"num_key_value_heads": 6},
    "multi-query": {"num_key_value_heads": 1},
    "group of 2, wide heads": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "one layer": {"num_hidden_layers": 1},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "attention bias only": {"attention_bias": True},
    "rope theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "rope linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "rope llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "eps": {"rms_norm_eps": 0.1},
}


def tokens_of(length: int, vocab: int = 96, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(vocab) for _ in range(length)]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logprobs_and_greedy_output_are_those_of_transformers(make_tiny_llama, make_driver, unpack, shape):
    tiny = make_tiny_llama(**shape)
    driver = make_driver(tiny.spec, tiny.folder)
    prompt = tokens_of(150)
    req = driver.start(prompt, SamplingParams(temperature=0.0, logprobs=5, prompt_logprobs=5))
    expected = tiny.logprobs(prompt)

    result = driver.step([(req, 150)])

    token, top_ids, top = unpack(result.prompt_logprobs[0])
    np.testing.assert_allclose(token, expected[torch.arange(149), prompt[1:]], atol=2e-4)
    np.testing.assert_allclose(top, expected[:-1].topk(5).values, atol=2e-4)
    assert (top_ids == expected[:-1].topk(5).indices.numpy()).mean() > 0.99
    token, _, top = unpack(result.logprobs[0])
    np.testing.assert_allclose(top[0], expected[-1].topk(5).values, atol=2e-4)
    assert token[0] == top[0, 0]
    while len(req.output) < 20:
        driver.step([(req, 1)])
    assert req.output == tiny.greedy(prompt, 20)


@pytest.mark.parametrize("shape", ["group of 3", "tied", "biases", "rope llama3"])
def test_bfloat16_is_as_close_to_float32_as_transformers_is(make_tiny_llama, make_driver, unpack, shape):
    tiny = make_tiny_llama(dtype="bfloat16", **SHAPES[shape])
    driver = make_driver(tiny.spec, tiny.folder, dtype="bfloat16")
    prompt = tokens_of(120)
    theirs = tiny.logprobs(prompt)[torch.arange(119), prompt[1:]].numpy()
    tiny.reference.float()
    exact = tiny.logprobs(prompt)[torch.arange(119), prompt[1:]].numpy()

    req = driver.start(prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    ours, _, _ = unpack(driver.step([(req, 120)]).prompt_logprobs[0])

    assert np.abs(ours - exact).mean() < 1.2 * np.abs(theirs - exact).mean() + 1e-3
    np.testing.assert_allclose(ours, exact, atol=0.3)


def test_only_known_architectures_are_built(make_tiny_llama, make_driver):
    from msgspec.structs import replace

    from engine.runtime.errors import ConfigError

    tiny = make_tiny_llama()
    with pytest.raises(ConfigError, match="model_type 'bloom' is not supported; supported are: .*, llama, "):
        make_driver(replace(tiny.spec, model_type="bloom"), tiny.folder)
