"""Families with layers of their own kinds under what serving adds: drafts, an int8 cache, a fixed order, retractions.

One variant of each, in bfloat16; bits are compared, so that each feature is seen to reach every kind of layer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.model_runner.kernels.cpu.library import reasons_against_library
from tests.model_runner.conftest import LATENT_MIXTURE, Driver
from tests.model_runner.sampling.test_draft_bits import Seen, begin, check_drafts, prompt_of
from tests.model_runner.test_fixed_order import alone, in_company, params, tokens_of

from .families import GEMMA3N, GEMMA4, GLM4_MOE, GPT_OSS, GRANITE, LLAMA4, SHARING, STEP

HEADS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {
        **HEADS,
        "head_dim": 16,
        "sliding_window": 40,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
    },
    "gpt_oss": {**GPT_OSS, **HEADS, "sliding_window": 40},
    "deepseek_v3": {"hidden_size": 64, **LATENT_MIXTURE},
    "glm4_moe": {**GLM4_MOE, **HEADS, "use_qk_norm": True, "n_group": 3, "topk_group": 2},
    "llama4_text": {**LLAMA4, **HEADS, "attention_chunk_size": 40},
    "granite": {**GRANITE, **HEADS},
    "step3p5": {**STEP, **HEADS, "sliding_window": 40},
    "gemma4_text": {**GEMMA4, **SHARING, **HEADS, "sliding_window": 40},
    "gemma3n_text": {**GEMMA3N, **HEADS, "sliding_window": 40},
    "cohere2": {**HEADS, "sliding_window": 40, "logit_scale": 0.3, "num_hidden_layers": 4},
}
NUM_DRAFTS = 6
LENGTHS = (37, 63, 126)
"""Drafts cross the border of a window, of a block of keys, and of a piece of a decode."""
families = pytest.mark.parametrize("model_type", FAMILIES)


@pytest.fixture(autouse=True)
def compiled():
    if reasons := reasons_against_library():
        pytest.skip("; ".join(reasons))


@pytest.fixture
def make(make_tiny_model: Any, make_driver: Any) -> Callable[..., Driver]:
    def make_one(model_type: str, **options: Any) -> Driver:
        tiny = make_tiny_model(model_type, dtype="bfloat16", **FAMILIES[model_type])
        options = {"page_size": 16, "max_model_len": 256, **options}
        driver: Driver = make_driver(tiny.spec, tiny.folder, dtype="bfloat16", **options)
        return driver

    return make_one


@pytest.mark.fast_cases(3)
@families
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int8"}, {"deterministic": True}], ids=str)
def test_drafts_have_the_logits_of_decodes(make, model_type, options):
    if model_type == "deepseek_v3" and "kv_cache_dtype" in options:
        pytest.skip("refused by name, see tests/launch/resolve/test_latent_attention.py")
    driver = make(model_type, speculative="ngram", **options)
    seen = Seen(driver)
    for length in LENGTHS:
        (req,) = begin(driver, [prompt_of(length)])
        seen.take()
        for _ in range(NUM_DRAFTS + 1):
            driver.step([(req, 1)])
        expected = seen.take()
        assert expected.isfinite().all() and not torch.equal(expected[0], expected[1])
        (again,) = begin(driver, [prompt_of(length)])
        seen.take()
        check_drafts(driver, [(again, req.output[1 : NUM_DRAFTS + 1])])
        assert torch.equal(seen.take(), expected), length
        for each in (req, again):
            driver.finish(each)


@pytest.mark.fast_cases(2)
@families
def test_a_fixed_order_hides_company_chunks_prefixes_and_retractions(make, model_type):
    driver = make(model_type, deterministic=True)
    common = tokens_of(80, 0)
    prompts = [common * (n % 2) + tokens_of(n, n) for n in (1, 20, 45, 70)]
    expected = [alone(driver, prompt, params(n)) for n, prompt in enumerate(prompts)]
    donor = driver.start(common)
    driver.step([(donor, 80)])
    reqs = [
        driver.start(prompt, params(n), prefix=(donor, 80) if prompt[:80] == common else None)
        for n, prompt in enumerate(prompts)
    ]
    seen = in_company(driver, reqs, random.Random(2))
    assert [seen[req.row] for req in reqs] == expected
    for n, prompt in enumerate(prompts):  # what was decoded comes back as prompt
        kept = 1 + n
        again = driver.start(prompt + expected[n].tokens[:kept], params(n), prompt_len=len(prompt))
        found = in_company(driver, [again], None)[again.row]
        assert (found.tokens, found.bits) == (expected[n].tokens[kept:], expected[n].bits[kept:])
