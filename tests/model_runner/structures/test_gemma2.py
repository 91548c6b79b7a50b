"""Gemma 2, and Gemma 3 with capped logits, against transformers on tiny random models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.models.weight_files.weight_memory import num_parameters
from engine.runtime.sampling_params import SamplingParams
from tests.model_runner.structures.test_architectures import GEMMA3, tokens_of
from tests.model_runner.structures.text_checks import check_int8_cache

GEMMA2 = {"head_dim": 16, "num_hidden_layers": 3, "sliding_window": 16, "query_pre_attn_scalar": 16}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "usual caps": ("gemma2", {**GEMMA2, "tie_word_embeddings": True}),
    "low caps": ("gemma2", {**GEMMA2, **CAPS}),
    "no caps": ("gemma2", {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "own scale, 9/3, biases, all layers alike": (
        "gemma2",
        {
            **GEMMA2,
            **CAPS,
            "hidden_size": 45,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "query_pre_attn_scalar": 40,
            "attention_bias": True,
            "layer_types": ["full_attention"] * 3,
        },
    ),
    "gemma3 with capped logits": ("gemma3_text", {**GEMMA3, "final_logit_softcapping": 4.0}),
}
variants = pytest.mark.parametrize(("model_type", "options"), VARIANTS.values(), ids=VARIANTS.keys())


@pytest.mark.fast_cases(3)
@variants
def test_prefill_and_decode_are_those_of_transformers(
    make_tiny_model, make_driver, unpack, model_type, options
):
    """A prompt in chunks, beyond the windows; then decodes beside another prompt's."""
    tiny = make_tiny_model(model_type, **options)
    driver = make_driver(tiny.spec, tiny.folder)
    prompt = tokens_of(100)
    req = driver.start(prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    other = driver.start(tokens_of(40, seed=1))
    found = []
    for chunk in (37, 1, 62):
        found += unpack(driver.step([(req, chunk)]).prompt_logprobs[0])[0].tolist()
    driver.step([(other, 40), (req, 1)])
    behind = driver.start(prompt[:80] + tokens_of(10, seed=3), prefix=(req, 80))
    driver.step([(behind, 10), (req, 1), (other, 1)])
    for _ in range(6):
        driver.step([(behind, 1), (req, 1), (other, 1)])

    expected = tiny.logprobs(prompt)
    np.testing.assert_allclose(found, expected[torch.arange(99), prompt[1:]], atol=2e-4)
    for each in (req, other, behind):
        predicted = tiny.logprobs(each.tokens)[each.prompt_len - 1 : -1].argmax(-1).tolist()
        assert predicted == each.output
    assert num_parameters(tiny.spec) == sum(p.numel() for p in tiny.reference.parameters())


def test_bfloat16_is_as_close_to_float32_as_transformers_is(make_tiny_model, make_driver, unpack):
    model_type, options = VARIANTS["low caps"]
    tiny = make_tiny_model(model_type, dtype="bfloat16", **options)
    driver = make_driver(tiny.spec, tiny.folder, dtype="bfloat16")
    prompt = tokens_of(120)
    theirs = tiny.logprobs(prompt)[torch.arange(119), prompt[1:]].numpy()
    tiny.reference.float()
    exact = tiny.logprobs(prompt)[torch.arange(119), prompt[1:]].numpy()

    req = driver.start(prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    ours, _, _ = unpack(driver.step([(req, 120)]).prompt_logprobs[0])

    assert np.abs(ours - exact).mean() < 1.25 * np.abs(theirs - exact).mean() + 1e-3


def test_an_int8_cache_changes_little(make_tiny_model, make_driver, unpack):
    model_type, options = VARIANTS["low caps"]
    tiny = make_tiny_model(model_type, **options)
    check_int8_cache(tiny, make_driver(tiny.spec, tiny.folder, kv_cache_dtype="int8"), unpack)
