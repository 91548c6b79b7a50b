"""Checks of a tiny model against transformers through the real runner; for tables of variants of a family."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from engine.model_runner.recording.programs.forward_program import ProgrammedForward
from engine.model_runner.recording.programs.native_executor import NativeExecutor
from engine.models.weight_files.weight_memory import num_parameters, weight_bytes
from engine.runtime.sampling_params import SamplingParams
from tests.model_runner.conftest import Driver, SeeingExecutor, TinyModel


def tokens_of(length: int, seed: int = 0, vocab: int = 96) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(vocab) for _ in range(length)]


def check_prefill_and_decode(tiny: TinyModel, driver: Driver, unpack: Any, length: int = 150) -> None:
    """Log-probabilities of a prompt, and greedy tokens after it."""
    prompt = tokens_of(length)
    req = driver.start(prompt, SamplingParams(temperature=0.0, logprobs=5, prompt_logprobs=5))
    expected = tiny.logprobs(prompt)
    result = driver.step([(req, length)])
    assert result.prompt_logprobs is not None
    token, top_ids, top = unpack(result.prompt_logprobs[0])
    np.testing.assert_allclose(token, expected[torch.arange(length - 1), prompt[1:]], atol=2e-4)
    np.testing.assert_allclose(top, expected[:-1].topk(5).values, atol=2e-4)
    assert (top_ids == expected[:-1].topk(5).indices.numpy()).mean() > 0.99
    while len(req.output) < 12:
        driver.step([(req, 1)])
    assert tiny.logprobs(prompt + req.output)[length - 1 : -1].argmax(-1).tolist() == req.output


def check_chunks_and_prefixes(tiny: TinyModel, driver: Driver, unpack: Any) -> None:
    """A long prompt in chunks beside decodes of many lengths, then a second request behind its cached prefix."""
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    decoding = [driver.start(tokens_of(length, seed=length)) for length in (1, 9, 40, 90)]
    driver.step([(req, len(req.tokens)) for req in decoding])
    prompt = tokens_of(150, seed=7)
    long = driver.start(prompt, params)
    found: list[float] = []
    for chunk in (37, 1, 80, 32):
        result = driver.step([(long, chunk), *((req, 1) for req in decoding)])
        assert result.prompt_logprobs is not None
        found += unpack(result.prompt_logprobs[0])[0].tolist()
    behind = driver.start(prompt[:100] + tokens_of(30, seed=8), prefix=(long, 100))
    driver.step([(behind, 30), (long, 1), *((req, 1) for req in decoding)])
    np.testing.assert_allclose(found, tiny.logprobs(prompt)[torch.arange(149), prompt[1:]], atol=2e-4)
    for req in (*decoding, long, behind):
        predicted = tiny.logprobs(req.tokens)[req.prompt_len - 1 : -1].argmax(-1).tolist()
        assert predicted == req.output


def check_bfloat16(tiny: TinyModel, driver: Driver, unpack: Any) -> None:
    """As close to the same model in float32 as transformers is; `tiny` and `driver` are in bfloat16."""
    prompt = tokens_of(120)
    theirs = tiny.logprobs(prompt)[torch.arange(119), prompt[1:]].numpy()
    tiny.reference.float()
    exact = tiny.logprobs(prompt)[torch.arange(119), prompt[1:]].numpy()
    req = driver.start(prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    result = driver.step([(req, 120)])
    assert result.prompt_logprobs is not None
    ours, _, _ = unpack(result.prompt_logprobs[0])
    assert np.abs(ours - exact).mean() < 1.25 * np.abs(theirs - exact).mean() + 1e-3


def check_recording(recorded: Driver, eager: Driver) -> None:
    """Steps as programs of the library give the bits that steps of single calls give; both are in bfloat16."""
    eager.run_eagerly()
    seen = [SeeingExecutor(driver) for driver in (recorded, eager)]
    for driver in (recorded, eager):
        reqs = [driver.start(tokens_of(length, seed=length)) for length in (70, 5)]
        driver.step([(req, len(req.tokens)) for req in reqs])
        for _ in range(3):
            driver.step([(req, 1) for req in reqs])
    for ours, theirs in zip(seen[0].logits, seen[1].logits, strict=True):
        assert theirs.isfinite().all() and torch.equal(ours, theirs)
    assert recorded.runner.executor.recorded_sizes == [2]
    assert isinstance(seen[0].inner, NativeExecutor)
    assert isinstance(seen[0].inner.eager.forward, ProgrammedForward), "steps with prompts are programs, too"


def check_int8_cache(tiny: TinyModel, driver: Driver, unpack: Any) -> None:
    """Keys and values in int8 change the log-probabilities a little; `driver` has such a pool."""
    prompt = tokens_of(120)
    exact = tiny.logprobs(prompt)[torch.arange(119), prompt[1:]].numpy()
    req = driver.start(prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    result = driver.step([(req, 120)])
    assert result.prompt_logprobs is not None
    ours, _, _ = unpack(result.prompt_logprobs[0])
    assert 0 < np.abs(ours - exact).mean() < 0.08


def check_memory(tiny: TinyModel) -> None:
    """What is planned is what the checkpoint has."""
    parameters = dict(tiny.reference.named_parameters())
    parameters |= {
        name: one
        for name, one in tiny.reference.named_buffers()
        if "correction_bias" in name or "layer_scalar" in name
    }
    assert num_parameters(tiny.spec) == sum(parameter.numel() for parameter in parameters.values())
    assert weight_bytes(tiny.spec, 2) == 2 * num_parameters(tiny.spec)
    config = tiny.reference.config
    if tiny.spec.streams.layer_heads:
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shared = getattr(config, "num_kv_shared_layers", 0)
    kv_numbers = 2 * (config.num_hidden_layers - shared) * config.num_key_value_heads * head_dim
    assert tiny.spec.kv_bytes_per_token(2) == 2 * kv_numbers
