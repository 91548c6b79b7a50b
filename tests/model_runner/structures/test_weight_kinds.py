"""Each family computes with weights of each kind, as docs/models.md says.

With int8, int4 and fp8 made while loading, the logits stay close to those of the 16-bit weights, and the weights are
smaller.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.models.families.registry import FAMILIES
from engine.models.spec.model_spec import with_quantization
from engine.models.weight_files.weight_memory import weight_bytes
from engine.runtime.sampling_params import SamplingParams

from .test_architectures import YARN, tokens_of
from .test_dense_families import GRANITE, GRANITE4
from .test_gemma_streams import GEMMA3N, GEMMA4, SHARING
from .test_mixtures import MINIMAX

DECODERS = [name for name, family in FAMILIES.items() if not family.is_encoder]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
DENSE_LATENT = {**LATENT, "first_k_dense_replace": 8}
GEMMA: dict[str, Any] = {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16}
STREAMS: dict[str, Any] = {**GEMMA4, "hidden_size_per_layer_input": 32}
UNIFIED: dict[str, Any] = {
    **{name: one for name, one in GEMMA4.items() if "per_layer_input" not in name},
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}
MOE = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
LOCAL_MOE = {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "block_auto_adjust_ff_dim": False,
}
DELTA: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
SHARED_MOE = {**MOE, "shared_expert_intermediate_size": 64}
OWN_FIELDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": MOE,
    "qwen2_moe": SHARED_MOE,
    "qwen3_next": {**DELTA, **SHARED_MOE},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **SHARED_MOE},
    "olmoe": {"intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2},
    # All experts compute: near ties would decide.
    "minimax_m2": {**MINIMAX, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 4},
    "mixtral": LOCAL_MOE,
    "phimoe": LOCAL_MOE,
    "granitemoe": {**LOCAL_MOE, **GRANITE},
    "granitemoeshared": {**LOCAL_MOE, **GRANITE, "shared_intermediate_size": 64},
    "ernie4_5_moe": {"moe_intermediate_size": 64, "moe_num_experts": 4, "moe_k": 2},
    "llama4_text": {**LOCAL_MOE, "head_dim": 16},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "gemma4_text": STREAMS | SHARING,
    "gemma4_unified_text": UNIFIED,
    "gemma3n_text": {**GEMMA3N, "hidden_size": 64, "laurel_rank": 32, "hidden_size_per_layer_input": 32},
    "lfm2": HYBRID,
    "lfm2_moe": {**HYBRID, **MOE, "num_dense_layers": 1},
    "granitemoehybrid": {
        **GRANITE4,
        "shared_intermediate_size": 128,
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_d_state": 16,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"],
        "num_hidden_layers": 4,
        "n_routed_experts": 4,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
        "head_dim": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 16,
    },
    "glm": {"head_dim": 16, "pad_token_id": 0},
    "glm4": {"head_dim": 16, "pad_token_id": 0},
    "ministral": {
        "head_dim": 16,
        "sliding_window": 17,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "ministral3": {"head_dim": 16, "rope_parameters": YARN},
    "deepseek_v2": DENSE_LATENT,
    "deepseek_v3": DENSE_LATENT,
    "glm4_moe_lite": {**LATENT, "mlp_layer_types": ["dense", "dense"]},
}
NO_CLASS = {"kimi_k2": "deepseek_v3"}
"""Types that transformers computes as another one."""
CLOSE = {"int8": 0.98, "fp8": 0.96, "int4": 0.8}
"""The least correlation of logits with those of the weights before; random weights have no structure to spare."""


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("model_type", DECODERS)
def test_a_family_computes_with_this_kind_of_weights(make_tiny_model, make_driver, unpack, model_type, kind):
    made_as = NO_CLASS.get(model_type, model_type)
    tiny = make_tiny_model(made_as, dtype="bfloat16", **{**SIZES, **OWN_FIELDS.get(made_as, {})})
    spec = with_quantization(tiny.spec, kind)

    exact = logprobs_of(make_driver(tiny.spec, tiny.folder, dtype="bfloat16"), unpack)
    rounded = logprobs_of(make_driver(spec, tiny.folder, dtype="bfloat16"), unpack)

    assert np.corrcoef(exact, rounded)[0, 1] > CLOSE[kind]
    assert not np.array_equal(exact, rounded)
    assert weight_bytes(spec, 2) < weight_bytes(tiny.spec, 2)


def logprobs_of(driver: Any, unpack: Any) -> np.ndarray[Any, Any]:
    """Of the tokens of a prompt."""
    prompt = tokens_of(150)
    req = driver.start(prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    logprobs, _, _ = unpack(driver.step([(req, 150)]).prompt_logprobs[0])
    return np.asarray(logprobs)
