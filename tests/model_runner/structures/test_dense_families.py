"""Dense families that are Llama's layers in other forms, against transformers; each variant is in published files."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.model_runner.kernels.cpu.library import reasons_against_library
from engine.models.hf.hf_config import read_hf_spec
from engine.runtime.errors import ConfigError

from .text_checks import (
    check_bfloat16,
    check_chunks_and_prefixes,
    check_int8_cache,
    check_memory,
    check_prefill_and_decode,
    check_recording,
)

YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}
WINDOWS = {"sliding_window": 21, "num_hidden_layers": 5}
FULL_YARN = {
    "rope_parameters": {
        "full_attention": YARN,
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    }
}
GROWING = {**YARN, "original_max_position_embeddings": 40, "llama_4_scaling_beta": 0.3}
GLM = {"head_dim": 16, "num_attention_heads": 4, "pad_token_id": 0}
GRANITE = {
    "attention_multiplier": 0.05,
    "embedding_multiplier": 2.5,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
    "rms_norm_eps": 1e-3,
}
GRANITE4 = {
    **GRANITE,
    "num_local_experts": 0,
    "shared_intermediate_size": 64,
    "layer_types": ["full_attention"] * 2,
    "mamba_n_heads": 8,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
FULL = ["full_attention"] * 2
GPT_J = {"num_attention_heads": 3, "num_key_value_heads": 1}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "smollm3 layers by list, windows, tied": (
        "smollm3",
        {
            "num_hidden_layers": 3,
            "no_rope_layers": [0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 19,
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
    ),
    "smollm3 yarn": ("smollm3", {"no_rope_layer_interval": 2, "rope_parameters": YARN, "mlp_bias": True}),
    "olmo2": ("olmo2", {}),
    "olmo2 one head, tied": (
        "olmo2",
        {
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-2,
        },
    ),
    "olmo2 9/3 biases": (
        "olmo2",
        {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "attention_bias": True},
    ),
    "olmo3": ("olmo3", WINDOWS),
    "olmo3 yarn in full layers": ("olmo3", {**WINDOWS, **FULL_YARN, "tie_word_embeddings": True}),
    "ministral": (
        "ministral",
        {"sliding_window": 17, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16},
    ),
    "ministral, window beyond the text": ("ministral", {"sliding_window": 400, "head_dim": 8}),
    "ministral3": ("ministral3", {"head_dim": 16, "rope_parameters": GROWING}),
    "ministral3 window, tied": (
        "ministral3",
        {"head_dim": 8, "rope_parameters": GROWING, "sliding_window": 30, "tie_word_embeddings": True},
    ),
    "glm": ("glm", GLM),
    "glm tied, whole heads rotate": (
        "glm",
        {
            **GLM,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 1.0},
        },
    ),
    "glm4": ("glm4", GLM),
    "glm4 wide heads": (
        "glm4",
        {**GLM, "head_dim": 72, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "starcoder2": ("starcoder2", {"tie_word_embeddings": True}),
    "starcoder2 window, no biases": ("starcoder2", {"sliding_window": 25, "use_bias": False}),
    "cohere2": ("cohere2", {**GPT_J, **WINDOWS, "tie_word_embeddings": True}),
    "cohere2 own head, biases, factor": (
        "cohere2",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "sliding_window": 40,
            "attention_bias": True,
            "logit_scale": 0.3,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "cohere": ("cohere", {**GPT_J, "tie_word_embeddings": True, "layer_norm_eps": 1e-2}),
    "exaone4": (
        "exaone4",
        {**WINDOWS, "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64}},
    ),
    "exaone4 without windows, tied": (
        "exaone4",
        {"sliding_window": None, "layer_types": FULL, "tie_word_embeddings": True},
    ),
    "granite": ("granite", GRANITE),
    "granite tied, biases, scaled rope": (
        "granite",
        {
            **GRANITE,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": YARN,
        },
    ),
    "granite 4, dense": ("granitemoehybrid", {**GRANITE4, "position_embedding_type": "rope"}),
    "granite 4, dense, without rotary, tied": ("granitemoehybrid", {**GRANITE4, "tie_word_embeddings": True}),
    "seed_oss": ("seed_oss", {"head_dim": 16, "attention_out_bias": True}),
    "ernie4_5": ("ernie4_5", {"head_dim": 16, "tie_word_embeddings": True, "use_bias": True}),
}
variants = pytest.mark.parametrize(("model_type", "options"), VARIANTS.values(), ids=VARIANTS.keys())
one_of_each = pytest.mark.parametrize(
    "variant",
    [
        "smollm3 layers by list, windows, tied",
        "olmo2",
        "olmo3 yarn in full layers",
        "ministral3",
        "glm4",
        "starcoder2",
        "cohere2",
        "granite",
    ],
)


@pytest.mark.fast_cases(8)
@variants
def test_is_the_model_of_transformers(make_tiny_model, make_driver, unpack, model_type, options):
    tiny = make_tiny_model(model_type, **options)
    assert tiny.spec.model_type == model_type
    check_memory(tiny)
    check_prefill_and_decode(tiny, make_driver(tiny.spec, tiny.folder), unpack)
    check_chunks_and_prefixes(tiny, make_driver(tiny.spec, tiny.folder), unpack)


@pytest.mark.fast_cases(3)
@one_of_each
def test_bfloat16_is_as_close_to_float32_as_transformers_is(make_tiny_model, make_driver, unpack, variant):
    model_type, options = VARIANTS[variant]
    tiny = make_tiny_model(model_type, dtype="bfloat16", **options)
    check_bfloat16(tiny, make_driver(tiny.spec, tiny.folder, dtype="bfloat16"), unpack)


WIDE = {"num_attention_heads": 3, "num_key_value_heads": 1}
RECORDED: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3": ("smollm3", {**WIDE, "num_hidden_layers": 4}),
    "olmo3": ("olmo3", {**WIDE, **WINDOWS, **FULL_YARN}),
    "ministral3": ("ministral3", {**WIDE, "head_dim": 16, "rope_parameters": GROWING}),
    "glm4": ("glm4", {**WIDE, "head_dim": 32}),
    "starcoder2": ("starcoder2", {**WIDE, "tie_word_embeddings": True}),
    "granite": ("granite", {**WIDE, **GRANITE}),
    "cohere2": ("cohere2", {**WIDE, **WINDOWS, "logit_scale": 0.3, "tie_word_embeddings": True}),
}


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(("model_type", "options"), RECORDED.values(), ids=RECORDED.keys())
def test_recorded_steps_have_the_bits_of_others(make_tiny_model, make_driver, model_type, options):
    if reasons := reasons_against_library():
        pytest.skip("; ".join(reasons))
    tiny = make_tiny_model(model_type, dtype="bfloat16", **options)
    check_recording(*(make_driver(tiny.spec, tiny.folder, dtype="bfloat16") for _ in range(2)))


@pytest.mark.fast_cases(3)
@one_of_each
def test_keys_and_values_in_8_bits(make_tiny_model, make_driver, unpack, variant):
    model_type, options = VARIANTS[variant]
    tiny = make_tiny_model(model_type, **options)
    check_int8_cache(tiny, make_driver(tiny.spec, tiny.folder, kv_cache_dtype="int8"), unpack)


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers is .*expected at least 5 numbers"),
        ("smollm3", {"hidden_act": "gelu"}, "hidden_act is 'gelu', only 'silu' is supported for smollm3"),
        (
            "olmo2",
            {"rope_parameters": {"rope_type": "dynamic"}},
            "rope_type is 'dynamic', which is not supported",
        ),
        (
            "olmo3 yarn in full layers",
            {"layer_types": ["chunked_attention"] * 5},
            "layer_types is .*expected a list of full_attention and sliding_attention",
        ),
        (
            "ministral3",
            {"rope_parameters": None},
            "rope_parameters is None, which transformers takes for yarn",
        ),
        ("glm4", {"partial_rotary_factor": 0.01, "rope_parameters": None}, "a part of each head must rotate"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier is 0, expected a number"),
        ("starcoder2", {"hidden_act": "relu"}, "hidden_act is 'relu', only 'gelu_pytorch_tanh'"),
        (
            "cohere",
            {"use_qk_norm": True},
            "use_qk_norm is True, norms of q and k with a weight for each head",
        ),
        ("cohere2", {"logit_scale": 0}, "logit_scale is 0, expected a number"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(make_tiny_model, variant, changes, message):
    model_type, options = VARIANTS[variant]
    tiny = make_tiny_model(model_type, **options)
    path = tiny.folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=message):
        read_hf_spec(tiny.folder)
