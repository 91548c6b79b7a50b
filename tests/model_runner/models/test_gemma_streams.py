"""Gemma 4 and Gemma 3n against transformers on tiny random models: each variant has several options at once."""

from __future__ import annotations

from typing import Any

import pytest

from engine.model_runner.kernels.cpu.library import reasons_against_library

from .text_checks import (
    check_bfloat16,
    check_chunks_and_prefixes,
    check_int8_cache,
    check_memory,
    check_prefill_and_decode,
    check_recording,
)

LOCAL, FULL = "sliding_attention", "full_attention"
ROPES = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000.0},
    LOCAL: {"rope_type": "default", "rope_theta": 100.0},
}
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "layer_types": [LOCAL, FULL, LOCAL, FULL],
    "sliding_window": 19,
    "rope_parameters": ROPES,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
    "tie_word_embeddings": True,
}
SHARING = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 4.0}
UNIFIED = {name: value for name, value in GEMMA4.items() if "per_layer_input" not in name}
GEMMA3N = {
    "head_dim": 16,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 5,
    "layer_types": [LOCAL, FULL, LOCAL, LOCAL, FULL],
    "sliding_window": 19,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 90,
    "laurel_rank": 12,
    "activation_sparsity_pattern": [0.6, 0.0, 0.9, 0.0, 0.3],
    "tie_word_embeddings": True,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4, shared keys, wide MLPs": ("gemma4_text", {**GEMMA4, **SHARING}),
    "gemma4, keys are values, own head, biases": (
        "gemma4_text",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "vocab_size_per_layer_input": 110,
        },
    ),
    "gemma4 without inputs of layers, all rotate": (
        "gemma4_text",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "num_hidden_layers": 7,
            "layer_types": None,
            "rope_parameters": ROPES | {FULL: {"rope_type": "default", "rope_theta": 1000.0}},
        },
    ),
    "gemma4_unified": (
        "gemma4_unified_text",
        {**UNIFIED, **SHARING, "attention_k_eq_v": True, "num_key_value_heads": 4},
    ),
    "gemma3n": ("gemma3n_text", GEMMA3N),
    "gemma3n, three streams, own widths, own cap": (
        "gemma3n_text",
        {
            **GEMMA3N,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "intermediate_size": [80, 64, 80, 48, 96],
            "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": None,
            "final_logit_softcapping": 7.0,
            "tie_word_embeddings": False,
        },
    ),
}
variants = pytest.mark.parametrize(("model_type", "options"), VARIANTS.values(), ids=VARIANTS.keys())
families = pytest.mark.parametrize("name", ["gemma4, shared keys, wide MLPs", "gemma3n"])


@variants
def test_every_variant_is_that_of_transformers(make_tiny_model, make_driver, unpack, model_type, options):
    tiny = make_tiny_model(model_type, **options)
    driver = make_driver(tiny.spec, tiny.folder)
    check_prefill_and_decode(tiny, driver, unpack)
    check_chunks_and_prefixes(tiny, driver, unpack)
    check_memory(tiny)


@families
def test_in_bfloat16_and_with_an_int8_cache(make_tiny_model, make_driver, unpack, name):
    model_type, options = VARIANTS[name]
    tiny = make_tiny_model(model_type, **options)
    check_int8_cache(tiny, make_driver(tiny.spec, tiny.folder, kv_cache_dtype="int8"), unpack)
    tiny = make_tiny_model(model_type, dtype="bfloat16", **options)
    check_bfloat16(tiny, make_driver(tiny.spec, tiny.folder, dtype="bfloat16"), unpack)


@families
def test_steps_are_recorded(make_tiny_model, make_driver, name):
    if reasons := reasons_against_library():
        pytest.skip("; ".join(reasons))
    model_type, options = VARIANTS[name]
    tiny = make_tiny_model(model_type, dtype="bfloat16", **options)
    check_recording(*(make_driver(tiny.spec, tiny.folder, dtype="bfloat16") for _ in range(2)))
