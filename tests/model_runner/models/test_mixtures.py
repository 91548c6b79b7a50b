"""Families with mixtures of experts, against transformers; each variant is in published files."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.runtime.errors import ConfigError
from engine.runtime.model_files.hf.hf_config import read_hf_spec
from engine.runtime.model_files.weight_files.check_weights import check_folder_weights

from .text_checks import (
    check_bfloat16,
    check_chunks_and_prefixes,
    check_int8_cache,
    check_memory,
    check_prefill_and_decode,
)

FEW = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24}
QWEN2 = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
OLMOE = {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 2.0],
    "long_factor": [1.5, 3.0, 6.0, 9.0],
    "short_mscale": 1.2,
    "long_mscale": 1.2,
    "original_max_position_embeddings": 256,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", FEW),
    "mixtral window, wide heads, tied": (
        "mixtral",
        {**FEW, "sliding_window": 21, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "qwen2_moe": ("qwen2_moe", QWEN2),
    "qwen2_moe dense layers, normalized, windows": (
        "qwen2_moe",
        {
            **QWEN2,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 19,
            "max_window_layers": 3,
            "qkv_bias": False,
        },
    ),
    "olmoe": ("olmoe", OLMOE),
    "olmoe normalized, groups of heads": (
        "olmoe",
        {**OLMOE, "norm_topk_prob": True, "attention_bias": True, "num_key_value_heads": 3},
    ),
    "phimoe": ("phimoe", {**FEW, "attention_bias": True, "lm_head_bias": True}),
    "phimoe longrope, few near": (
        "phimoe",
        {**FEW, "router_jitter_noise": 0.3, "rope_parameters": LONGROPE, "sliding_window": 33},
    ),
}
variants = pytest.mark.parametrize("variant", VARIANTS)


@variants
def test_prefill_and_decode_are_those_of_transformers(make_tiny_model, make_driver, unpack, variant):
    model_type, options = VARIANTS[variant]
    tiny = make_tiny_model(model_type, **options)
    check_folder_weights(tiny.folder, tiny.spec)
    check_memory(tiny)
    check_prefill_and_decode(tiny, make_driver(tiny.spec, tiny.folder), unpack)


@variants
def test_chunks_prefixes_and_mixed_steps_change_nothing(make_tiny_model, make_driver, unpack, variant):
    model_type, options = VARIANTS[variant]
    tiny = make_tiny_model(model_type, **options)
    check_chunks_and_prefixes(tiny, make_driver(tiny.spec, tiny.folder), unpack)


@pytest.mark.parametrize("variant", ["mixtral", "qwen2_moe", "olmoe", "phimoe"])
def test_bfloat16_is_as_close_to_float32_as_transformers_is(make_tiny_model, make_driver, unpack, variant):
    model_type, options = VARIANTS[variant]
    tiny = make_tiny_model(model_type, dtype="bfloat16", **options)
    check_bfloat16(tiny, make_driver(tiny.spec, tiny.folder, dtype="bfloat16"), unpack)


@pytest.mark.parametrize("variant", ["mixtral", "qwen2_moe"])
def test_an_int8_cache_changes_little(make_tiny_model, make_driver, unpack, variant):
    model_type, options = VARIANTS[variant]
    tiny = make_tiny_model(model_type, **options)
    check_int8_cache(tiny, make_driver(tiny.spec, tiny.folder, kv_cache_dtype="int8"), unpack)


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0, clipped queries, keys and values are not supported"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok is 3, this router always chooses 2"),
        (
            "phimoe longrope, few near",
            {"rope_parameters": {**LONGROPE, "long_mscale": 1.3}},
            "long_mscale is 1.3, expected short_mscale, 1.2",
        ),
        ("mixtral", {"num_experts_per_tok": 9}, "9 experts for each token, but there are only 6"),
        ("mixtral", {"hidden_act": "gelu"}, "only 'silu' is supported for mixtral"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(make_tiny_model, variant, change, message):
    model_type, options = VARIANTS[variant]
    folder = make_tiny_model(model_type, **options).folder
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises(ConfigError, match=message):
        read_hf_spec(folder)
