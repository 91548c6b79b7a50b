"""Families with mixtures of experts, against transformers; each variant is in published files."""

from __future__ import annotations

import json
from typing import Any, Literal

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from engine.model_runner.kernels.cpu.library import reasons_against_library
from engine.models.hf.hf_config import read_hf_spec
from engine.models.spec.quantization import QuantizationSpec
from engine.models.weight_files.check_weights import check_folder_weights
from engine.models.weight_files.weight_memory import weight_bytes
from engine.runtime.errors import ConfigError
from engine.runtime.sampling_params import SamplingParams

from .test_dense_families import GRANITE, GRANITE4
from .text_checks import (
    check_bfloat16,
    check_chunks_and_prefixes,
    check_int8_cache,
    check_memory,
    check_prefill_and_decode,
    tokens_of,
)

FEW = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24}
QWEN2 = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
OLMOE = {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24}
GLM4 = {
    "head_dim": 16,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
GPT_OSS = {
    **FEW,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "sliding_window": 19,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 2.0],
    "long_factor": [1.5, 3.0, 6.0, 9.0],
    "short_mscale": 1.2,
    "long_mscale": 1.2,
    "original_max_position_embeddings": 256,
}
MINIMAX = {**FEW, "head_dim": 16, "rotary_dim": 8, "eos_token_id": 2, "bos_token_id": 1}
LLAMA4 = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "num_local_experts": 6,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "attention_chunk_size": 45,
    "floor_scale": 32,
    "attn_scale": 0.4,
}
ERNIE = {
    "num_hidden_layers": 3,
    "moe_num_experts": 6,
    "moe_k": 2,
    "moe_intermediate_size": 24,
}
SCOUT_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
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
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "gpt_oss other activation, no biases, as wide as long": (
        "gpt_oss",
        {
            **GPT_OSS,
            "swiglu_alpha": 1.2,
            "swiglu_limit": 1.5,
            "attention_bias": False,
            "intermediate_size": 48,
        },
    ),
    "glm4_moe": ("glm4_moe", {**GLM4, "attention_bias": True, "routed_scaling_factor": 2.5}),
    "glm4_moe norms of heads, groups, two shared": (
        "glm4_moe",
        {
            **GLM4,
            "use_qk_norm": True,
            "n_group": 3,
            "topk_group": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "minimax_m2": ("minimax_m2", MINIMAX),
    # Near ties of experts would decide comparisons in bfloat16.
    "minimax_m2 all experts": ("minimax_m2", {**MINIMAX, "num_experts_per_tok": 6}),
    "llama4 as Scout": ("llama4_text", {**LLAMA4, "rope_parameters": SCOUT_ROPE}),
    "llama4 as Maverick, two experts, stacks as wide as long": (
        "llama4_text",
        {
            **LLAMA4,
            "use_qk_norm": False,
            "interleave_moe_layer_step": 2,
            "num_experts_per_tok": 2,
            "intermediate_size": 48,
            "no_rope_layers": [1, 0, 0, 1],
            "attention_bias": True,
            "attention_chunk_size": 64,
        },
    ),
    "llama4 as MobileLLM, dense, tied": (
        "llama4_text",
        {
            **LLAMA4,
            "num_hidden_layers": 2,
            "moe_layers": [],
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [0, 1],
            "tie_word_embeddings": True,
            "num_key_value_heads": 6,
            "attention_chunk_size": 1,
        },
    ),
    "granitemoe": ("granitemoe", {**FEW, **GRANITE}),
    "granitemoeshared tied, biases": (
        "granitemoeshared",
        {
            **FEW,
            **GRANITE,
            "shared_intermediate_size": 40,
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
    ),
    "granite 4 with experts": (
        "granitemoehybrid",
        {**GRANITE4, **FEW, "shared_intermediate_size": 40, "position_embedding_type": "rope"},
    ),
    "ernie4_5_moe": ("ernie4_5_moe", ERNIE),
    "ernie4_5_moe every other layer, without shared ones, biases": (
        "ernie4_5_moe",
        {
            **ERNIE,
            "num_hidden_layers": 4,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
            "moe_layer_interval": 2,
            "moe_num_shared_experts": 0,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "phimoe": ("phimoe", {**FEW, "attention_bias": True, "lm_head_bias": True}),
    "phimoe longrope, few near": (
        "phimoe",
        {**FEW, "router_jitter_noise": 0.3, "rope_parameters": LONGROPE, "sliding_window": 33},
    ),
}
variants = pytest.mark.parametrize("variant", VARIANTS)
ONE_OF_EACH = (
    "mixtral",
    "qwen2_moe",
    "olmoe",
    "phimoe",
    "glm4_moe",
    "gpt_oss",
    "llama4 as Scout",
    "granitemoeshared tied, biases",
    "ernie4_5_moe",
    "minimax_m2 all experts",
)


@pytest.mark.fast_cases(8)
@variants
def test_prefill_and_decode_are_those_of_transformers(make_tiny_model, make_driver, unpack, variant):
    model_type, options = VARIANTS[variant]
    tiny = make_tiny_model(model_type, **options)
    check_folder_weights(tiny.folder, tiny.spec)
    check_memory(tiny)
    driver = make_driver(tiny.spec, tiny.folder)
    driver.run_eagerly()  # experts in float32 are computed one after the other, which is not recorded
    check_prefill_and_decode(tiny, driver, unpack)


@pytest.mark.fast_cases(3)
@variants
def test_chunks_prefixes_and_mixed_steps_change_nothing(make_tiny_model, make_driver, unpack, variant):
    model_type, options = VARIANTS[variant]
    tiny = make_tiny_model(model_type, **options)
    check_chunks_and_prefixes(tiny, make_driver(tiny.spec, tiny.folder), unpack)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("variant", ONE_OF_EACH)
def test_bfloat16_is_as_close_to_float32_as_transformers_is(make_tiny_model, make_driver, unpack, variant):
    model_type, options = VARIANTS[variant]
    tiny = make_tiny_model(model_type, dtype="bfloat16", **options)
    check_bfloat16(tiny, make_driver(tiny.spec, tiny.folder, dtype="bfloat16"), unpack)


WHOLE_HEADS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("variant", ONE_OF_EACH)
def test_decodes_are_recorded_and_repeat_the_eager_ones(make_tiny_model, make_driver, variant):
    if reasons := reasons_against_library():
        pytest.skip("; ".join(reasons))
    model_type, options = VARIANTS[variant]
    tiny = make_tiny_model(model_type, dtype="bfloat16", **{**options, **WHOLE_HEADS})
    prompts = [tokens_of(20), tokens_of(31, seed=1)]
    driver = make_driver(tiny.spec, tiny.folder, dtype="bfloat16")
    found = driver.generate(prompts, num=8)
    assert driver.native.reason_against == ""
    assert driver.native.recorded_sizes == [2] and driver.native.num_replayed > 4
    driver.run_eagerly()
    assert driver.generate(prompts, num=8) == found


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("variant", ["mixtral", "qwen2_moe", "glm4_moe", "gpt_oss", "llama4 as Scout"])
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
        ("ernie4_5_moe", {"moe_norm_min": 1e-3}, "moe_norm_min is 0.001, only 1e-12 or less is supported"),
        (
            "granite 4 with experts",
            {"num_experts_per_tok": 9},
            "9 experts for each token, but there are only 6",
        ),
        (
            "llama4 as Scout",
            {"attention_chunk_size": None},
            "attention_chunk_size is None, expected a whole number",
        ),
        (
            "llama4 as Scout",
            {"layer_types": ["sliding_attention"] * 4},
            "layer_types is .*expected a list of full_attention and chunked_attention",
        ),
        (
            "llama4 as Scout",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "rope_type is 'yarn', which is not supported; supported are: default, linear, llama3",
        ),
        (
            "llama4 as Scout",
            {"moe_layers": None, "interleave_moe_layer_step": 0},
            "interleave_moe_layer_step is 0, expected a whole number from 1",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(make_tiny_model, variant, change, message):
    model_type, options = VARIANTS[variant]
    folder = make_tiny_model(model_type, **options).folder
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises(ConfigError, match=message):
        read_hf_spec(folder)


WHOLE_BLOCKS = {
    "mixtral": {"intermediate_size": 64},
    "qwen2_moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96},
    "olmoe": {"intermediate_size": 64},
    "phimoe": {"intermediate_size": 64},
    "gpt_oss": {"intermediate_size": 64},
    "glm4_moe": {"moe_intermediate_size": 64, "intermediate_size": 96, "first_k_dense_replace": 0},
    "llama4 as Scout": {"intermediate_size": 64},
    "granitemoeshared tied, biases": {"intermediate_size": 64, "shared_intermediate_size": 96},
    "ernie4_5_moe": {"moe_intermediate_size": 64, "moe_layer_start_index": 0},
}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("variant", WHOLE_BLOCKS)
def test_quantized_experts_take_their_planned_memory(make_tiny_model, make_driver, unpack, variant):
    if reasons := reasons_against_library():
        pytest.skip("; ".join(reasons))
    model_type, options = VARIANTS[variant]
    sizes = {**options, **WHOLE_HEADS, **WHOLE_BLOCKS[variant]}
    tiny = make_tiny_model(model_type, dtype="bfloat16", **sizes)
    prompt = tokens_of(60)
    exact = tiny.logprobs(prompt)[torch.arange(59), prompt[1:]].numpy()
    held: dict[str, int] = {}
    methods: tuple[tuple[Literal["int8", "int4"], float], ...] = (("int8", 0.25), ("int4", 0.8))
    for method, tolerance in methods:
        driver = make_driver(tiny.spec, tiny.folder, dtype="bfloat16", quantization=method)
        req = driver.start(prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
        ours, _, _ = unpack(driver.step([(req, 60)]).prompt_logprobs[0])
        assert np.abs(ours - exact).mean() < tolerance
        spec = structs.replace(tiny.spec, quantization=QuantizationSpec(method=method, stored=False))
        experts = [layer.mlp.experts for layer in driver.runner.model.layers]
        parts = [part for layer in experts for part in (layer._gate_up, layer._down)]
        held[method] = sum(one.num_bytes for part in parts for one in part._weights)
        without = structs.replace(spec, experts=structs.replace(spec.experts, num_experts=3))
        size, inner = tiny.spec.hidden_size, spec.experts.intermediate_size
        biases = spec.experts.routing.has_bias + spec.experts.has_bias * (1 + 2 * inner + size)
        beside = 3 * (size + biases) * tiny.spec.num_layers * 2  # of the router, and biases
        assert weight_bytes(spec, 2) - weight_bytes(without, 2) - beside == held[method] // 2
    assert held["int4"] < held["int8"]


def test_layers_of_ernie_that_predict_further_tokens_are_not_read(make_tiny_model, make_driver, unpack):
    tiny = make_tiny_model("ernie4_5_moe", **ERNIE)
    tensors = load_file(tiny.folder / "model.safetensors")
    tensors["model.mtp_block.0.mlp.gate_proj.weight"] = torch.ones(2, 2)
    tensors["model.mtp_emb_norm.0.weight"] = torch.ones(2)
    save_file(tensors, tiny.folder / "model.safetensors")
    check_folder_weights(tiny.folder, tiny.spec)
    check_prefill_and_decode(tiny, make_driver(tiny.spec, tiny.folder), unpack, length=20)


def test_weights_need_no_checkpoint(make_tiny_model, make_driver):
    model_type, options = VARIANTS["qwen2_moe"]
    spec = make_tiny_model(model_type, **options).spec
    found = make_driver(spec).generate([tokens_of(20)], num=4)
    assert found == make_driver(spec).generate([tokens_of(20)], num=4)
