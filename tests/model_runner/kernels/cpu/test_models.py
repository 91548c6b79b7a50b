"""Whole tiny models on our CPU kernels: log-probabilities and text of transformers, alone and sharing a prefix."""

from __future__ import annotations

import logging
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.model_runner.kernels.cpu.library import reasons_against_library
from engine.model_runner.kernels.native import NativeOps
from engine.model_runner.kernels.native_matmul import NativeMatmul
from engine.model_runner.layers import embedding
from engine.runtime.sampling_params import SamplingParams
from tests.model_runner.conftest import MIXTURE

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "llama with biases, odd widths": {
        "head_dim": 32,
        "num_key_value_heads": 3,
        "attention_bias": True,
        "mlp_bias": True,
        "intermediate_size": 90,
        "vocab_size": 101,
    },
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 16, **MIXTURE},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


@pytest.fixture(autouse=True)
def compiled(best_library):
    """Where our kernels are not chosen there is nothing to test here."""
    if reasons := reasons_against_library():
        pytest.skip("; ".join(reasons))


def tokens_of(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(96) for _ in range(length)]


@pytest.fixture
def make_pair(make_tiny_model: Any, make_driver: Any, caplog: Any) -> Any:
    """A model of transformers and a driver of ours, which must have chosen our kernels."""

    def make(shape: str, dtype: str) -> Any:
        model_type = shape.split(maxsplit=1)[0]
        tiny = make_tiny_model(model_type, dtype=dtype, **SHAPES[shape])
        with caplog.at_level(logging.DEBUG):
            driver = make_driver(tiny.spec, tiny.folder, dtype=dtype, page_size=16)
        assert "attention_backend prompts=native decodes=native" in caplog.text
        linear = "onednn" if dtype == "float32" else "native"
        assert f"provider={linear}" in next(
            line for line in caplog.text.splitlines() if "op=pack_linear" in line
        )
        assert "provider=native" in next(
            line for line in caplog.text.splitlines() if "op=rotate_and_store" in line
        )
        return tiny, driver

    return make


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("shape", SHAPES)
def test_float32_gives_the_text_of_transformers(make_pair, shape):
    tiny, driver = make_pair(shape, "float32")
    prompt = tokens_of(90)
    assert driver.generate([prompt], SamplingParams(temperature=0.0, ignore_eos=True), num=12) == [
        tiny.greedy(prompt, 12)
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_is_as_close_to_float32_as_transformers_is(make_pair, unpack, shape):
    tiny, driver = make_pair(shape, "bfloat16")
    prompt = tokens_of(120)
    after = torch.arange(119), prompt[1:]
    theirs = tiny.logprobs(prompt)[after].numpy()
    tiny.reference.float()
    exact = tiny.logprobs(prompt)[after].numpy()

    req = driver.start(prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    ours, _, _ = unpack(driver.step([(req, 120)]).prompt_logprobs[0])

    assert np.abs(ours - exact).mean() < 1.2 * np.abs(theirs - exact).mean() + 1e-3


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("shape", ["llama", "gemma3_text"])
def test_an_embedding_is_looked_up_in_its_head(
    make_tiny_model, make_driver, unpack, monkeypatch, shape, quantization
):
    """With the bits of a table in bfloat16, and no such table is held."""
    tiny = make_tiny_model(shape, dtype="bfloat16", tie_word_embeddings=True, **SHAPES[shape])
    tables: list[weakref.ref[Tensor]] = []
    read = embedding.vocabulary_rows

    def vocabulary_rows(*args: Any) -> Tensor:
        table = read(*args)
        tables.append(weakref.ref(table))
        return table

    def logprobs() -> tuple[list[float], int]:
        tables.clear()
        driver = make_driver(
            tiny.spec, tiny.folder, dtype="bfloat16", page_size=16, quantization=quantization
        )
        num_held = sum(table() is not None for table in tables)
        req = driver.start(tokens_of(70), SamplingParams(temperature=0.0, prompt_logprobs=0))
        return unpack(driver.step([(req, 70)]).prompt_logprobs[0])[0].tolist(), num_held

    monkeypatch.setattr(embedding, "vocabulary_rows", vocabulary_rows)
    looked_up, num_held = logprobs()
    assert num_held == 0
    monkeypatch.setattr(embedding, "LinearWithRows", type(None))  # nothing is one
    assert logprobs() == (looked_up, 1)


def test_an_activation_within_its_product_changes_no_bits(make_tiny_model, make_driver, unpack, monkeypatch):
    tiny = make_tiny_model("llama", dtype="bfloat16", head_dim=16, intermediate_size=80)

    def logprobs() -> tuple[Any, Any]:
        driver = make_driver(tiny.spec, tiny.folder, dtype="bfloat16", page_size=16)
        req = driver.start(tokens_of(70), SamplingParams(temperature=0.0, prompt_logprobs=0, logprobs=3))
        prompt = driver.step([(req, 70)])
        decoded = driver.step([(req, 1)])
        return unpack(prompt.prompt_logprobs[0])[0].tolist(), unpack(decoded.logprobs[0])[2].tolist()

    with monkeypatch.context() as patch:
        patch.setattr(NativeOps, "silu_and_mul", lambda *_: pytest.fail("it is computed on its own"))
        fused = logprobs()
    monkeypatch.setattr(NativeMatmul, "fuse_silu_and_mul", lambda _weight: False)
    assert logprobs() == fused


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_requests_that_share_a_prefix_get_what_they_get_alone(make_pair, unpack, dtype):
    """Log-probabilities of decoded tokens: alone, and with the prefix's pages shared by six, up to a near tie."""
    _, driver = make_pair("llama", dtype)
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=0)
    prefix, tails = tokens_of(128), [tokens_of(5, seed) for seed in range(6)]

    def decode(reqs: list[Any]) -> list[list[tuple[int, float]]]:
        found: list[list[tuple[int, float]]] = [[] for _ in reqs]
        for _ in range(4):
            result = driver.step([(req, 1) for req in reqs])
            tokens = np.frombuffer(result.next_token_ids, dtype=np.int32).tolist()
            for mine, token, packed in zip(found, tokens, result.logprobs, strict=True):
                mine.append((token, float(unpack(packed)[0][0])))
        return found

    alone, reqs = [], []
    for tail in tails:
        req = driver.start(prefix + tail, greedy)
        driver.step([(req, 133)])
        alone += decode([req])
        driver.finish(req)
    first = driver.start(prefix + tails[0], greedy)
    driver.step([(first, 133)])
    for tail in tails:
        req = driver.start(prefix + tail, greedy, prefix=(first, 128))
        driver.step([(req, 5)])
        reqs.append(req)
    pairs = []
    for shared, own in zip(decode(reqs), alone, strict=True):
        for here, there in zip(shared, own, strict=True):
            pairs.append((here[1], there[1]))
            if here[0] != there[0]:  # a near tie, if these two are close; what follows them differs
                break
    assert len(pairs) >= 18  # of 24
    ours, theirs = zip(*pairs, strict=True)
    np.testing.assert_allclose(ours, theirs, atol=1e-4 if dtype == "float32" else 0.1)


def test_linear_layers_and_decodes_give_the_same_bits_in_every_batch(make_pair, unpack):
    """With prompts computed alone: whose neighbors differ in the decodes only."""
    _, driver = make_pair("llama", "bfloat16")
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=3)

    def decoded(num_others: int) -> list[Any]:
        reqs = []
        for seed in range(num_others + 1):
            reqs.append(driver.start(tokens_of(20 + 7 * seed, seed), greedy))
            driver.step([(reqs[-1], 20 + 7 * seed)])
        found = [unpack(driver.step([(req, 1) for req in reqs]).logprobs[0])[2].tolist() for _ in range(5)]
        for req in reqs:
            driver.finish(req)
        return found

    alone = decoded(0)
    assert decoded(3) == alone
    assert decoded(9) == alone
