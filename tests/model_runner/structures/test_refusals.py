"""Fields of config.json that change what a family computes and are not implemented are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.models.hf.hf_config import read_hf_spec
from engine.runtime.errors import ConfigError

from .families import FAMILIES, PHIMOE_LONGROPE

REFUSED: list[tuple[str, dict[str, Any], str]] = [  # a row of the table, changed fields, the error
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
    ("ministral3", {"rope_parameters": None}, "rope_parameters is None, which transformers takes for yarn"),
    ("glm4", {"partial_rotary_factor": 0.01, "rope_parameters": None}, "a part of each head must rotate"),
    ("granite", {"residual_multiplier": 0}, "residual_multiplier is 0, expected a number"),
    ("starcoder2", {"hidden_act": "relu"}, "hidden_act is 'relu', only 'gelu_pytorch_tanh'"),
    ("cohere", {"use_qk_norm": True}, "use_qk_norm is True, norms of q and k with a weight for each head"),
    ("cohere2", {"logit_scale": 0}, "logit_scale is 0, expected a number"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0, clipped queries, keys and values are not supported"),
    ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok is 3, this router always chooses 2"),
    (
        "phimoe longrope, few near",
        {"rope_parameters": {**PHIMOE_LONGROPE, "long_mscale": 1.3}},
        "long_mscale is 1.3, expected short_mscale, 1.2",
    ),
    ("mixtral", {"num_experts_per_tok": 9}, "9 experts for each token, but there are only 6"),
    ("mixtral", {"hidden_act": "gelu"}, "only 'silu' is supported for mixtral"),
    ("ernie4_5_moe", {"moe_norm_min": 0.001}, "moe_norm_min is 0.001, only 1e-12 or less is supported"),
    ("granite 4 with experts", {"num_experts_per_tok": 9}, "9 experts for each token, but there are only 6"),
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
    (
        "gemma4, shared keys, wide MLPs",
        {"enable_moe_block": True},
        "use_double_wide_mlp is True, only false is supported for a model with experts",
    ),
    (
        "gemma4, shared keys, wide MLPs",
        {"use_bidirectional_attention": "all"},
        "use_bidirectional_attention is 'all', only attention to earlier tokens",
    ),
    ("gemma4, shared keys, wide MLPs", {"num_kv_shared_layers": 3}, "num_kv_shared_layers is 3, each kind"),
    ("gemma4, shared keys, wide MLPs", {"rope_scaling": {"factor": 2.0}}, "rope_scaling is .*ignores here"),
    ("gemma4, shared keys, wide MLPs", {"global_head_dim": 64}, "but global_head_dim is 64"),
    (
        "gemma4, shared keys, wide MLPs",
        {"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 64}}},
        "per_layer_config is .*the same heads in all layers of a kind",
    ),
    (
        "gemma4, shared keys, wide MLPs",
        {"per_layer_config": {"1": {"intermediate_size": 32}}},
        "per_layer_config\\.1\\.intermediate_size is 32, which cannot differ",
    ),
    ("gemma4, shared keys, wide MLPs", {"vocab_size_per_layer_input": 90}, "at least vocab_size"),
    ("gemma3n", {"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern is .*each of 5 layers"),
    ("gemma3n", {"altup_active_idx": 4}, "altup_active_idx is 4"),
    ("gemma3n", {"intermediate_size": [80, 80]}, "intermediate_size is .*each of 5 layers"),
    ("gemma3n", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, which these models"),
    (
        "qwen3_5_text",
        {"layer_types": ["linear_attention", "mamba"] * 2},
        "layer_types .* expected a list of linear_attention",
    ),
    (
        "qwen3_5_text",
        {"linear_num_value_heads": 3},
        "3 value heads cannot share 4 key heads of a delta net evenly",
    ),
    (
        "qwen3_5_text",
        {"linear_conv_kernel_dim": 1},
        "linear_conv_kernel_dim is 1, expected a whole number from 2",
    ),
    ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate is False, only true is supported"),
    (
        "qwen3_5_text",
        {"mamba_ssm_dtype": "bfloat16"},
        "mamba_ssm_dtype is 'bfloat16', only float32 is supported",
    ),
    (
        "mamba2 dense, no rotary",
        {"layer_types": ["mamba", "conv"] * 2},
        "layer_types .* expected a list of mamba, linear_attention,",
    ),
    ("mamba2 dense, no rotary", {"layer_types": ["mamba"]}, "1 kinds of layers for 4 layers"),
    ("mamba2 dense, no rotary", {"layer_types": None}, "a model needs at least one layer with attention"),
    (
        "mamba2 dense, no rotary",
        {"layers_block_type": ["mamba"] * 4},
        "but layers_block_type is .* another name of the same",
    ),
    (
        "mamba2 dense, no rotary",
        {"mamba_n_heads": 5, "mamba_d_head": 24},
        "mamba_n_heads is 5, but 5 heads of 24 are not 2 times",
    ),
    (
        "mamba2 dense, no rotary",
        {"mamba_n_groups": 3},
        "4 heads of a Mamba layer cannot form 3 groups evenly",
    ),
    ("mamba2 dense, no rotary", {"mamba_d_conv": 1}, "mamba_d_conv is 1, expected a whole number from 2"),
    (
        "mamba2 dense, no rotary",
        {"time_step_limit": [2.0, 1.0]},
        "time_step_limit .* expected two numbers, the least and the largest",
    ),
    (
        "mamba2 dense, no rotary",
        {"position_embedding_type": "alibi"},
        "position_embedding_type is 'alibi', expected rope",
    ),
    (
        "nemotron_h",
        {"moe_latent_size": -1, "n_routed_experts": 8, "layers_block_type": ["full_attention", "moe"]},
        "moe_latent_size is -1, expected",
    ),
    ("nemotron_h", {"n_shared_experts": 2}, "n_shared_experts is 2, only 1 is supported"),
    ("nemotron_h", {"layers_block_type": ["mamba", "conv", "attention"]}, "'conv' is no known kind of layer"),
    (
        "nemotron_h",
        {"layers_block_type": ["mamba", "mlp"], "num_hidden_layers": 2},
        "at least one layer with attention",
    ),
    ("nemotron_h", {"layers_block_type": ["mlp"] * 5}, "at least one layer with attention"),
    ("nemotron_h", {"num_hidden_layers": 7}, "num_hidden_layers is 7, but layers_block_type has 5 layers"),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu', only relu2 is supported"),
    ("nemotron_h", {"attention_bias": True}, "attention_bias is True, only false is supported"),
    ("nemotron_h", {"residual_in_fp32": True}, "residual_in_fp32 is True, only false is supported"),
    (
        "nemotron_h",
        {"quantization_config": {"quant_method": "aqlm"}},
        "quant_method is 'aqlm', which is not supported",
    ),
    ("nemotron_h", {"sliding_window": 64}, "sliding_window is 64, only null is supported"),
    ("nemotron_h", {"mamba_proj_bias": True}, "mamba_proj_bias is True, but use_bias, which decides"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(tmp_path, name, changes, message):
    from transformers import AutoConfig

    row = FAMILIES[name]
    sizes = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    AutoConfig.for_model(row.made_as, **sizes | heads | row.options).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ConfigError, match=message):
        read_hf_spec(tmp_path)
