"""Every architecture against transformers on tiny random models, through the real runner.

Each variant is one thing that published checkpoints of the family have: windows shorter than the text, tied heads,
heads wider than their share, groups of three, scaled rotary, experts.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from engine.models.weight_files.weight_memory import num_parameters, weight_bytes
from engine.runtime.sampling_params import SamplingParams

YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 2.0],
    "long_factor": [1.5, 3.0, 6.0, 9.0],
}
QWEN3 = {"head_dim": 8}
MOE = {
    "head_dim": 8,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}
GEMMA3 = {"head_dim": 16, "num_hidden_layers": 7, "sliding_window": 16, "query_pre_attn_scalar": 16}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral window": ("mistral", {"sliding_window": 23}),
    "mistral window of one": ("mistral", {"sliding_window": 1}),
    "mistral wide heads tied": (
        "mistral",
        {"sliding_window": 64, "num_attention_heads": 4, "head_dim": 32, "tie_word_embeddings": True},
    ),
    "mistral yarn": ("mistral", {"sliding_window": None, "rope_parameters": YARN}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 window in some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen2 yarn": ("qwen2", {"rope_parameters": {**YARN, "attention_factor": 1.3, "beta_fast": 8.0}}),
    "qwen3": ("qwen3", QWEN3),
    "qwen3 9/3 wide heads": ("qwen3", {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16}),
    "qwen3 tied biases": ("qwen3", {**QWEN3, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3 yarn": ("qwen3", {**QWEN3, "rope_parameters": YARN}),
    "qwen3_moe": ("qwen3_moe", MOE),
    "qwen3_moe raw shares": ("qwen3_moe", {**MOE, "norm_topk_prob": False, "num_experts_per_tok": 1}),
    "qwen3_moe all active": ("qwen3_moe", {**MOE, "num_experts_per_tok": 8, "tie_word_embeddings": True}),
    "qwen3_moe dense layers": (
        "qwen3_moe",
        {**MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "qwen3_moe window": ("qwen3_moe", {**MOE, "use_sliding_window": True, "sliding_window": 30}),
    "gemma3": ("gemma3_text", {**GEMMA3, "tie_word_embeddings": True}),
    "gemma3 untied, own scale, 9/3": (
        "gemma3_text",
        {
            **GEMMA3,
            "hidden_size": 45,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "query_pre_attn_scalar": 40,
        },
    ),
    "gemma3 scaled global rope": (
        "gemma3_text",
        {
            **GEMMA3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "phi3": ("phi3", {}),
    "phi3 window": ("phi3", {"sliding_window": 33}),
    "phi3 longrope, short": (
        "phi3",
        {
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 256,
            "max_position_embeddings": 2048,
        },
    ),
    "phi3 longrope, long": (
        "phi3",
        {
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 64,
            "max_position_embeddings": 2048,
        },
    ),
    "phi3 part of the head rotates, tied": (
        "phi3",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "tie_word_embeddings": True,
        },
    ),
}
variants = pytest.mark.parametrize(("model_type", "options"), VARIANTS.values(), ids=VARIANTS.keys())


def tokens_of(length: int, seed: int = 0, vocab: int = 96) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(vocab) for _ in range(length)]


def use_long_factors_for_short_texts(tiny: Any) -> None:
    """Transformers chooses longrope's factors by the text's length, the engine once for all."""
    scaling = tiny.spec.rope_scaling
    if scaling.kind == "longrope" and scaling.original_max_position == 64:
        tiny.logprobs([1])
        rotary = tiny.reference.model.rotary_emb
        rotary.original_inv_freq.copy_(rotary.long_inv_freq)


@pytest.mark.fast_cases(8)
@variants
def test_prefill_and_decode_are_those_of_transformers(
    make_tiny_model, make_driver, unpack, model_type, options
):
    tiny = make_tiny_model(model_type, **options)
    driver = make_driver(tiny.spec, tiny.folder)
    prompt = tokens_of(150)
    req = driver.start(prompt, SamplingParams(temperature=0.0, logprobs=5, prompt_logprobs=5))
    expected = tiny.logprobs(prompt)

    result = driver.step([(req, 150)])

    token, top_ids, top = unpack(result.prompt_logprobs[0])
    np.testing.assert_allclose(token, expected[torch.arange(149), prompt[1:]], atol=2e-4)
    np.testing.assert_allclose(top, expected[:-1].topk(5).values, atol=2e-4)
    assert (top_ids == expected[:-1].topk(5).indices.numpy()).mean() > 0.99
    while len(req.output) < 12:
        driver.step([(req, 1)])
    logits = tiny.logprobs(prompt + req.output)
    assert logits[149:-1].argmax(-1).tolist() == req.output


@pytest.mark.fast_cases(4)
@variants
def test_chunks_prefixes_and_mixed_steps_change_nothing(
    make_tiny_model, make_driver, unpack, model_type, options
):
    """A long prompt in chunks beside decodes of many lengths, then a second request behind its cached prefix."""
    tiny = make_tiny_model(model_type, **options)
    use_long_factors_for_short_texts(tiny)
    driver = make_driver(tiny.spec, tiny.folder)
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    decoding = [driver.start(tokens_of(length, seed=length)) for length in (1, 9, 40, 90)]
    driver.step([(req, len(req.tokens)) for req in decoding])
    prompt = tokens_of(150, seed=7)
    long = driver.start(prompt, params)
    found = []

    for chunk in (37, 1, 80, 32):
        result = driver.step([(long, chunk), *((req, 1) for req in decoding)])
        found += unpack(result.prompt_logprobs[0])[0].tolist()
    behind = driver.start(prompt[:100] + tokens_of(30, seed=8), prefix=(long, 100))
    driver.step([(behind, 30), (long, 1), *((req, 1) for req in decoding)])

    np.testing.assert_allclose(found, tiny.logprobs(prompt)[torch.arange(149), prompt[1:]], atol=2e-4)
    for req in (*decoding, long, behind):
        predicted = tiny.logprobs(req.tokens)[req.prompt_len - 1 : -1].argmax(-1).tolist()
        assert predicted == req.output


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(
    "variant",
    ["mistral window", "qwen2", "qwen3 9/3 wide heads", "qwen3_moe", "gemma3", "phi3 longrope, long"],
)
def test_bfloat16_is_as_close_to_float32_as_transformers_is(make_tiny_model, make_driver, unpack, variant):
    model_type, options = VARIANTS[variant]
    tiny = make_tiny_model(model_type, dtype="bfloat16", **options)
    driver = make_driver(tiny.spec, tiny.folder, dtype="bfloat16")
    prompt = tokens_of(120)
    theirs = tiny.logprobs(prompt)[torch.arange(119), prompt[1:]].numpy()
    tiny.reference.float()
    exact = tiny.logprobs(prompt)[torch.arange(119), prompt[1:]].numpy()

    req = driver.start(prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    ours, _, _ = unpack(driver.step([(req, 120)]).prompt_logprobs[0])

    assert np.abs(ours - exact).mean() < 1.25 * np.abs(theirs - exact).mean() + 1e-3


@pytest.mark.fast_cases(9)
@variants
def test_memory_is_what_the_checkpoint_has(make_tiny_model, model_type, options):
    tiny = make_tiny_model(model_type, **options)
    parameters = dict(tiny.reference.named_parameters())

    assert num_parameters(tiny.spec) == sum(p.numel() for p in parameters.values())
    norms = sum(p.numel() for name, p in parameters.items() if "norm" in name)
    wider = 2 * norms if model_type == "gemma3_text" else 0  # kept in float32
    assert weight_bytes(tiny.spec, 2) == 2 * num_parameters(tiny.spec) + wider
    config = tiny.reference.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    assert tiny.spec.kv_bytes_per_token(2) == 2 * kv_numbers
