"""The table of families: tiny models of each, the checks that run on them, and their options for weights in blocks.

A new family of an existing structure is one row. `test_families.py` holds the contract that runs over the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import own_code  # registers the types that transformers lacks with transformers

__all__ = ["own_code"]


@dataclass(frozen=True)
class Row:
    """A tiny model of a family, as published files have it, and what is checked of it beside its logits and memory.

    Attributes:
        model_type: The type in config.json.
        options: Fields of transformers' configuration that differ from those of `make_tiny_model`.
        bfloat16: Compare in bfloat16, too.
        int8_cache: Compare with keys and values in int8.
        wide: Fields that give the model heads that the C++ kernels have; its recorded steps are checked. None: not.
        in_float32: Parts of the names of parameters that stay in float32 beside weights of 16 bits.
        chunks: How a prompt of 64 tokens is cut beside decodes; of layers with states only, which have no prefixes.
        blocks: Fields that give the family rows of whole blocks of 32 numbers, once for each family: with them its
            weights are quantized, and the doctor's verdict is compared with loading. None: another row has them.
        made_as: The type as which transformers computes it.
        gguf: The architecture of its GGUF file, and options that differ there, as files cannot say all. None: no file,
            or one of a test of its own, as those of latent attention and of layers with states.
    """

    model_type: str
    options: dict[str, Any]
    bfloat16: bool
    int8_cache: bool
    wide: dict[str, Any] | None
    in_float32: tuple[str, ...]
    chunks: tuple[tuple[int, ...], ...]
    blocks: dict[str, Any] | None
    made_as: str
    gguf: tuple[str, dict[str, Any]] | None

    @property
    def in_file(self) -> dict[str, Any]:
        """The options of the model that is written to a GGUF file."""
        return self.options | (self.gguf[1] if self.gguf else {})

    @property
    def in_blocks(self) -> dict[str, Any]:
        """All options of the family in sizes of whole blocks."""
        return BLOCKS | (self.blocks or {})


def row(
    model_type: str,
    *options: dict[str, Any],
    bfloat16: bool = False,
    int8_cache: bool = False,
    wide: dict[str, Any] | None = None,
    in_float32: tuple[str, ...] = (),
    chunks: tuple[tuple[int, ...], ...] = (),
    blocks: dict[str, Any] | None = None,
    made_as: str = "",
    gguf: tuple[str, dict[str, Any]] | None = None,
    **further: Any,
) -> Row:
    """A `Row` whose options are those of the dicts, a later one before an earlier, and all further keywords."""
    merged = {name: value for each in (*options, further) for name, value in each.items()}
    return Row(
        model_type,
        merged,
        bfloat16,
        int8_cache,
        wide,
        in_float32,
        chunks,
        blocks,
        made_as or model_type,
        gguf,
    )


CHUNKS = ((1, 1, 1, 1, 60), (37, 1, 2, 24), (5, 3, 56), (64,))
BLOCKS = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Sizes below the `blocks` of each family."""
LOCAL, FULL = "sliding_attention", "full_attention"
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 2.0],
    "long_factor": [1.5, 3.0, 6.0, 9.0],
}
QWEN3: dict[str, Any] = {"head_dim": 8}
QWEN3_MOE: dict[str, Any] = {
    "head_dim": 8,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}
GEMMA3: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": 7,
    "sliding_window": 16,
    "query_pre_attn_scalar": 16,
}
GEMMA2: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": 3,
    "sliding_window": 16,
    "query_pre_attn_scalar": 16,
}
GEMMA: dict[str, Any] = {"head_dim": 16, "num_attention_heads": 4, "tie_word_embeddings": True}
DEEPSEEK_MOE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 6,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
}
CAPS: dict[str, Any] = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0}
WINDOWS: dict[str, Any] = {"sliding_window": 21, "num_hidden_layers": 5}
FULL_YARN: dict[str, Any] = {
    "rope_parameters": {
        "full_attention": YARN,
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    }
}
GROWING: dict[str, Any] = {**YARN, "original_max_position_embeddings": 40, "llama_4_scaling_beta": 0.3}
GLM: dict[str, Any] = {"head_dim": 16, "num_attention_heads": 4, "pad_token_id": 0}
GRANITE: dict[str, Any] = {
    "attention_multiplier": 0.05,
    "embedding_multiplier": 2.5,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
    "rms_norm_eps": 0.001,
}
GRANITE4: dict[str, Any] = {
    **GRANITE,
    "num_local_experts": 0,
    "shared_intermediate_size": 64,
    "layer_types": ["full_attention"] * 2,
    "mamba_n_heads": 8,
}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
ALL_FULL = [FULL] * 2
GPT_J: dict[str, Any] = {"num_attention_heads": 3, "num_key_value_heads": 1}
HEADS_OF_16 = GPT_J
FEW_EXPERTS: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24}
QWEN2_MOE: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
OLMOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24}
GLM4_MOE: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
GPT_OSS: dict[str, Any] = {
    **FEW_EXPERTS,
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
PHIMOE_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 2.0],
    "long_factor": [1.5, 3.0, 6.0, 9.0],
    "short_mscale": 1.2,
    "long_mscale": 1.2,
    "original_max_position_embeddings": 256,
}
MINIMAX: dict[str, Any] = {
    **FEW_EXPERTS,
    "head_dim": 16,
    "rotary_dim": 8,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
LLAMA4: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "num_local_experts": 6,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "attention_chunk_size": 45,
    "floor_scale": 32,
    "attn_scale": 0.4,
}
LLAMA4_FIXED: dict[str, Any] = {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}
"""What GGUF files do not say."""
ERNIE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "moe_num_experts": 6,
    "moe_k": 2,
    "moe_intermediate_size": 24,
}
SCOUT_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}
LATENT: dict[str, Any] = {
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "first_k_dense_replace": 8,
}
LATENT_EXPERTS: dict[str, Any] = {
    **LATENT,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
}
SPARSE: dict[str, Any] = {
    **LATENT,
    "num_hidden_layers": 3,
    "q_lora_rank": 20,
    "index_topk": 24,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "first_k_dense_replace": 8,
}
"""Some sixteen index heads: a score of 0 is a tie of tokens, which happens if all products are negative."""
MIMO: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "v_head_dim": 16,
    "sliding_window": 19,
    "layer_types": [FULL, LOCAL, FULL],
    "mlp_layer_types": ["dense"] * 3,
    "rope_parameters": {
        FULL: {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.334},
        LOCAL: {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.334},
    },
}
STEP_ROPES: dict[str, Any] = {
    FULL: {**LLAMA3_ROPE, "original_max_position_embeddings": 64, "partial_rotary_factor": 0.5},
    LOCAL: {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
}
STEP: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_sliding_attention_heads": 6,
    "head_dim": 16,
    "sliding_window": 19,
    "layer_types": [FULL, LOCAL, LOCAL, FULL],
    "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
    "rope_parameters": STEP_ROPES,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "share_expert_dim": 32,
    "moe_router_scaling_factor": 3.0,
    "swiglu_limits": [0.0, None, 0.6, 0.0],
    "swiglu_limits_shared": [0.0, 0.8, 0.9, 0.0],
}
LATENT_LITE: dict[str, Any] = {
    name: value for name, value in LATENT.items() if name != "first_k_dense_replace"
}
GEMMA4_ROPES: dict[str, Any] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000.0},
    LOCAL: {"rope_type": "default", "rope_theta": 100.0},
}
GEMMA4: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "layer_types": [LOCAL, FULL, LOCAL, FULL],
    "sliding_window": 19,
    "rope_parameters": GEMMA4_ROPES,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
    "tie_word_embeddings": True,
}
SHARING: dict[str, Any] = {
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 4.0,
}
GEMMA4_UNIFIED: dict[str, Any] = {
    name: value for name, value in GEMMA4.items() if "per_layer_input" not in name
}
GEMMA3N: dict[str, Any] = {
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
DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
QWEN_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
LFM2_MOE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_dense_layers": 1,
}
LFM2: dict[str, Any] = {
    "num_hidden_layers": 5,
    "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
}
MAMBA: dict[str, Any] = {
    **GRANITE,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_local_experts": 0,
    "intermediate_size": 64,
    "shared_intermediate_size": 64,
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
}
MAMBA_EXPERTS: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24}
NEMOTRON: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "head_dim": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 20,
    "layer_norm_epsilon": 0.0001,
    "time_step_min": 1e-9,  # transformers bounds the steps of prompts by it, but not those of decodes
}
NEMOTRON_EXPERTS: dict[str, Any] = {
    **NEMOTRON,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
    "num_hidden_layers": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.7,
}
LATENT_BLOCKS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
DENSE_LATENT_BLOCKS: dict[str, Any] = {**LATENT_BLOCKS, "first_k_dense_replace": 8}
SPARSE_BLOCKS: dict[str, Any] = {"index_topk": 256, "index_n_heads": 16, "index_head_dim": 32}
GEMMA_BLOCKS: dict[str, Any] = {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16}
STREAMS_BLOCKS: dict[str, Any] = {**GEMMA4, "hidden_size_per_layer_input": 32}
UNIFIED_BLOCKS: dict[str, Any] = {
    **GEMMA4_UNIFIED,
    "num_hidden_layers": 2,
    "layer_types": [LOCAL, FULL],
}
EXPERTS_BLOCKS: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
LOCAL_EXPERTS_BLOCKS: dict[str, Any] = {
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
CONV_BLOCKS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "block_auto_adjust_ff_dim": False,
}
DELTA_BLOCKS: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
SHARED_EXPERTS_BLOCKS: dict[str, Any] = {**EXPERTS_BLOCKS, "shared_expert_intermediate_size": 64}

DELTA_FLOAT32 = ("norm", "A_log", "dt_bias")
MAMBA_FLOAT32 = ("A_log", "dt_bias", ".D", "mamba.norm.weight", "mixer.norm.weight")

FAMILIES: dict[str, Row] = {
    "baichuan": row("baichuan", num_key_value_heads=6, blocks={"num_key_value_heads": 4}, made_as="llama"),
    "xverse": row(
        "xverse",
        num_key_value_heads=6,
        blocks={"num_key_value_heads": 4},
        made_as="llama",
        gguf=("xverse", {}),
    ),
    "qwen": row("qwen", num_key_value_heads=6, blocks={"num_key_value_heads": 4}, made_as="qwen2"),
    "exaone": row(
        "exaone",
        head_dim=16,
        rope_parameters={**LLAMA3_ROPE, "original_max_position_embeddings": 64},
        blocks={},
        made_as="llama",
        gguf=("exaone", {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}),
    ),
    "internlm2": row("internlm2", blocks={}, made_as="llama", gguf=("internlm2", {})),
    "internlm2 wide heads": row(
        "internlm2",
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=8,
        attention_bias=True,
        made_as="llama",
    ),
    "chatglm": row(
        "chatglm", GLM, attention_bias=True, blocks={"head_dim": 16, "pad_token_id": 0}, made_as="glm"
    ),
    "phi3_v": row("phi3_v", blocks={}, made_as="phi3"),
    "mimo_v2_flash": row(
        "mimo_v2_flash",
        MIMO,
        bfloat16=True,
        blocks={
            **MIMO,
            "num_hidden_layers": 2,
            "layer_types": [FULL, LOCAL],
            "mlp_layer_types": ["dense"] * 2,
        },
    ),
    "mimo_v2_flash experts, as wide values": row(
        "mimo_v2_flash",
        MIMO,
        v_head_dim=24,
        attention_value_scale=0.6,
        attention_bias=True,
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        mlp_layer_types=["dense", "sparse", "sparse"],
        gguf=("mimo2", {"attention_bias": False, "v_head_dim": 16}),
    ),
    "step3p5": row(
        "step3p5",
        STEP,
        bfloat16=True,
        in_float32=("norm",),
        wide={
            "hidden_size": 64,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "share_expert_dim": 32,
        },
        blocks={
            **STEP,
            "num_hidden_layers": 2,
            "layer_types": [FULL, LOCAL],
            "mlp_layer_types": ["dense", "sparse"],
            "moe_intermediate_size": 64,
            "share_expert_dim": 64,
            "moe_router_scaling_factor": 1.0,
            "n_routed_experts": 4,
            "swiglu_limits": [0.0, 9.0],
            "swiglu_limits_shared": [9.0, 0.0],
        },
        gguf=("step35", {}),
    ),
    "step3p5 all layers alike": row(
        "step3p5",
        num_hidden_layers=2,
        layer_types=ALL_FULL,
        sliding_window=19,
        head_dim=16,
        attention_bias=True,
        mlp_bias=True,
        query_pre_attn_scalar=40,
        mlp_layer_types=["sparse", "dense"],
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        share_expert_dim=24,
        tie_word_embeddings=True,
        rope_parameters={FULL: YARN},
        in_float32=("norm",),
    ),
    "nemotron-nas": row(
        "nemotron-nas",
        intermediate_size=256,
        block_configs=[{"attention": {"n_heads_in_group": 3}, "ffn": {"ffn_mult": 2.5}}] * 2,
        blocks={},
        made_as="llama",
    ),
    "stablelm": row("stablelm", use_qkv_bias=True, blocks={}, gguf=("stablelm", {})),
    "stablelm whole heads": row(
        "stablelm",
        bfloat16=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 1.0},
    ),
    "mistral": row("mistral", sliding_window=None, blocks={}, gguf=("llama", {})),
    "mistral window": row("mistral", sliding_window=23, bfloat16=True),
    "mistral window of one": row("mistral", sliding_window=1),
    "mistral wide heads tied": row(
        "mistral",
        sliding_window=64,
        num_attention_heads=4,
        head_dim=32,
        tie_word_embeddings=True,
        gguf=("llama", {"sliding_window": None, "tie_word_embeddings": False}),
    ),
    "mistral yarn": row("mistral", sliding_window=None, rope_parameters=YARN),
    "qwen2": row("qwen2", bfloat16=True, blocks={}, gguf=("qwen2", {})),
    "mimo": row("mimo", head_dim=16, blocks={}, made_as="qwen2"),
    "qwen2 tied": row("qwen2", tie_word_embeddings=True),
    "qwen2 window in some layers": row(
        "qwen2", use_sliding_window=True, sliding_window=20, max_window_layers=1, num_hidden_layers=3
    ),
    "qwen2 yarn": row("qwen2", rope_parameters={**YARN, "attention_factor": 1.3, "beta_fast": 8.0}),
    "qwen3": row("qwen3", QWEN3, blocks={}),
    "qwen3 9/3 wide heads": row(
        "qwen3", num_attention_heads=9, num_key_value_heads=3, head_dim=16, bfloat16=True, gguf=("qwen3", {})
    ),
    "qwen3 tied biases": row("qwen3", QWEN3, tie_word_embeddings=True, attention_bias=True),
    "qwen3 yarn": row("qwen3", QWEN3, rope_parameters=YARN, gguf=("qwen3", {})),
    "qwen3_moe": row("qwen3_moe", QWEN3_MOE, bfloat16=True, blocks=EXPERTS_BLOCKS, gguf=("qwen3moe", {})),
    "qwen3_moe raw shares": row("qwen3_moe", QWEN3_MOE, norm_topk_prob=False, num_experts_per_tok=1),
    "qwen3_moe all active": row("qwen3_moe", QWEN3_MOE, num_experts_per_tok=8, tie_word_embeddings=True),
    "qwen3_moe dense layers": row(
        "qwen3_moe", QWEN3_MOE, num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3]
    ),
    "qwen3_moe window": row("qwen3_moe", QWEN3_MOE, use_sliding_window=True, sliding_window=30),
    "gemma3": row(
        "gemma3_text",
        GEMMA3,
        tie_word_embeddings=True,
        bfloat16=True,
        in_float32=("norm",),
        blocks=GEMMA_BLOCKS,
        gguf=("gemma3", {}),
    ),
    "gemma3 untied, own scale, 9/3": row(
        "gemma3_text",
        GEMMA3,
        hidden_size=45,
        num_attention_heads=9,
        num_key_value_heads=3,
        query_pre_attn_scalar=40,
        in_float32=("norm",),
    ),
    "gemma3 scaled global rope": row(
        "gemma3_text",
        GEMMA3,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        in_float32=("norm",),
        gguf=(
            "gemma3",
            {
                "rope_parameters": {
                    FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                    LOCAL: {"rope_type": "default", "rope_theta": 1e4},
                }
            },
        ),
    ),
    "phi3": row("phi3", blocks={}),
    "phi3 window": row("phi3", sliding_window=33, gguf=("phi3", {})),
    "phi3 longrope, short": row(
        "phi3", rope_parameters=LONGROPE, original_max_position_embeddings=256, max_position_embeddings=2048
    ),
    "phi3 longrope, long": row(
        "phi3",
        rope_parameters=LONGROPE,
        original_max_position_embeddings=64,
        max_position_embeddings=2048,
        bfloat16=True,
        gguf=("phi3", {}),
    ),
    "phi3 part of the head rotates, tied": row(
        "phi3",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        tie_word_embeddings=True,
        gguf=("phi3", {"tie_word_embeddings": False}),
    ),
    "llama": row("llama", bfloat16=True, blocks={}),
    "llama multi-head": row("llama", num_key_value_heads=6),
    "llama multi-query": row("llama", num_key_value_heads=1),
    "llama group of 2, wide heads": row("llama", num_attention_heads=4, num_key_value_heads=2, head_dim=32),
    "llama one layer": row("llama", num_hidden_layers=1),
    "llama tied": row("llama", tie_word_embeddings=True, bfloat16=True),
    "llama biases": row("llama", attention_bias=True, mlp_bias=True, bfloat16=True, gguf=("llama", {})),
    "llama attention bias only": row("llama", attention_bias=True),
    "llama rope theta": row("llama", rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
    "llama rope linear": row(
        "llama", rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "llama rope llama3": row(
        "llama",
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        bfloat16=True,
    ),
    "llama eps": row("llama", rms_norm_eps=0.1),
    "gemma": row(
        "gemma", GEMMA, bfloat16=True, in_float32=("norm",), blocks={"head_dim": 16}, gguf=("gemma", {})
    ),
    "gemma own head, one KV head, biases": row(
        "gemma",
        GEMMA,
        num_key_value_heads=1,
        attention_bias=True,
        tie_word_embeddings=False,
        in_float32=("norm",),
    ),
    "deepseek": row(
        "deepseek",
        DEEPSEEK_MOE,
        bfloat16=True,
        blocks={**DEEPSEEK_MOE, **EXPERTS_BLOCKS, "n_routed_experts": 4, "num_key_value_heads": 4},
        gguf=("deepseek", {}),
    ),
    "deepseek_v2 with Llama's attention": row("deepseek_v2", DEEPSEEK_MOE, use_mla=False, made_as="deepseek"),
    "gemma2 usual caps": row(
        "gemma2", GEMMA2, tie_word_embeddings=True, in_float32=("norm",), blocks=GEMMA_BLOCKS
    ),
    "gemma2 low caps": row(
        "gemma2",
        GEMMA2,
        CAPS,
        bfloat16=True,
        int8_cache=True,
        in_float32=("norm",),
        gguf=("gemma2", {"tie_word_embeddings": True}),
    ),
    "gemma2 no caps": row(
        "gemma2", GEMMA2, attn_logit_softcapping=None, final_logit_softcapping=None, in_float32=("norm",)
    ),
    "gemma2 own scale, 9/3, biases, all layers alike": row(
        "gemma2",
        GEMMA2,
        CAPS,
        hidden_size=45,
        num_attention_heads=9,
        num_key_value_heads=3,
        query_pre_attn_scalar=40,
        attention_bias=True,
        layer_types=["full_attention"] * 3,
        in_float32=("norm",),
    ),
    "gemma3 with capped logits": row(
        "gemma3_text", GEMMA3, final_logit_softcapping=4.0, in_float32=("norm",)
    ),
    "smollm3": row(
        "smollm3",
        num_hidden_layers=5,
        wide={**HEADS_OF_16, "num_hidden_layers": 4},
        blocks={},
        gguf=("smollm3", {"num_hidden_layers": 4, "attention_bias": True}),
    ),
    "smollm3 layers by list, windows, tied": row(
        "smollm3",
        num_hidden_layers=3,
        no_rope_layers=[0, 1, 0],
        use_sliding_window=True,
        sliding_window=19,
        tie_word_embeddings=True,
        attention_bias=True,
        bfloat16=True,
        int8_cache=True,
    ),
    "smollm3 yarn": row("smollm3", no_rope_layer_interval=2, rope_parameters=YARN, mlp_bias=True),
    "olmo2": row("olmo2", bfloat16=True, int8_cache=True, blocks={}, gguf=("olmo2", {})),
    "olmo2 one head, tied": row(
        "olmo2", num_attention_heads=1, num_key_value_heads=1, tie_word_embeddings=True, rms_norm_eps=0.01
    ),
    "olmo2 9/3 biases": row(
        "olmo2", num_attention_heads=9, num_key_value_heads=3, hidden_size=72, attention_bias=True
    ),
    "olmo3": row("olmo3", WINDOWS, blocks={}),
    "olmo3 yarn in full layers": row(
        "olmo3",
        WINDOWS,
        FULL_YARN,
        tie_word_embeddings=True,
        bfloat16=True,
        int8_cache=True,
        wide={**HEADS_OF_16, "tie_word_embeddings": False},
        gguf=("olmo2", {"tie_word_embeddings": False}),
    ),
    "ministral": row(
        "ministral",
        sliding_window=17,
        layer_types=[LOCAL, FULL],
        head_dim=16,
        blocks={"head_dim": 16, "sliding_window": 17, "layer_types": [LOCAL, FULL]},
    ),
    "ministral, window beyond the text": row("ministral", sliding_window=400, head_dim=8),
    "ministral3": row(
        "ministral3",
        head_dim=16,
        rope_parameters=GROWING,
        bfloat16=True,
        int8_cache=True,
        wide=HEADS_OF_16,
        blocks={"head_dim": 16, "rope_parameters": YARN},
        gguf=(
            "mistral3",
            {
                "rope_parameters": {
                    **GROWING,
                    "original_max_position_embeddings": 24,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                }
            },
        ),
    ),
    "ministral3 window, tied": row(
        "ministral3", head_dim=8, rope_parameters=GROWING, sliding_window=30, tie_word_embeddings=True
    ),
    "glm": row(
        "glm",
        GLM,
        blocks={"head_dim": 16, "pad_token_id": 0},
        gguf=("chatglm", {"head_dim": 8, "num_attention_heads": 6}),
    ),
    "glm tied, whole heads rotate": row(
        "glm",
        GLM,
        tie_word_embeddings=True,
        attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 1.0},
    ),
    "glm4": row(
        "glm4",
        GLM,
        bfloat16=True,
        int8_cache=True,
        wide={**HEADS_OF_16, "head_dim": 32},
        blocks={"head_dim": 16, "pad_token_id": 0},
        gguf=("glm4", {"head_dim": 8, "num_attention_heads": 6}),
    ),
    "glm4 wide heads": row("glm4", GLM, head_dim=72, num_key_value_heads=4, tie_word_embeddings=True),
    "starcoder2": row(
        "starcoder2",
        tie_word_embeddings=True,
        bfloat16=True,
        int8_cache=True,
        wide=HEADS_OF_16,
        blocks={},
        gguf=("starcoder2", {}),
    ),
    "starcoder2 window, no biases": row("starcoder2", sliding_window=25, use_bias=False),
    "cohere2": row(
        "cohere2",
        GPT_J,
        WINDOWS,
        tie_word_embeddings=True,
        bfloat16=True,
        int8_cache=True,
        wide={"logit_scale": 0.3},
        blocks={},
        gguf=("cohere2", {"logit_scale": 0.3}),
    ),
    "cohere2 own head, biases, factor": row(
        "cohere2",
        num_attention_heads=3,
        num_key_value_heads=3,
        sliding_window=40,
        attention_bias=True,
        logit_scale=0.3,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "cohere": row(
        "cohere", GPT_J, tie_word_embeddings=True, layer_norm_eps=0.01, blocks={}, gguf=("command-r", {})
    ),
    "exaone4": row(
        "exaone4",
        WINDOWS,
        rope_parameters={**LLAMA3_ROPE, "original_max_position_embeddings": 64},
        blocks={},
        gguf=("exaone4", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    ),
    "exaone4 without windows, tied": row(
        "exaone4", sliding_window=None, layer_types=ALL_FULL, tie_word_embeddings=True
    ),
    "granite": row(
        "granite", GRANITE, bfloat16=True, int8_cache=True, wide=HEADS_OF_16, blocks={}, gguf=("granite", {})
    ),
    "granite tied, biases, scaled rope": row(
        "granite", GRANITE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, rope_parameters=YARN
    ),
    "granite 4, dense": row(
        "granitemoehybrid",
        GRANITE4,
        position_embedding_type="rope",
        blocks={
            **GRANITE4,
            "shared_intermediate_size": 128,
            "layer_types": ["linear_attention", "full_attention"],
            "mamba_d_state": 16,
        },
    ),
    "granite 4, dense, without rotary, tied": row("granitemoehybrid", GRANITE4, tie_word_embeddings=True),
    "seed_oss": row(
        "seed_oss",
        head_dim=16,
        attention_out_bias=True,
        blocks={},
        gguf=("seed_oss", {"attention_out_bias": False}),
    ),
    "ernie4_5": row(
        "ernie4_5",
        head_dim=16,
        tie_word_embeddings=True,
        use_bias=True,
        blocks={},
        gguf=("ernie4_5", {"use_bias": False}),
    ),
    "mixtral": row(
        "mixtral",
        FEW_EXPERTS,
        bfloat16=True,
        int8_cache=True,
        blocks=LOCAL_EXPERTS_BLOCKS,
        gguf=("llama", {}),
    ),
    "mixtral window, wide heads, tied": row(
        "mixtral", FEW_EXPERTS, sliding_window=21, head_dim=16, tie_word_embeddings=True
    ),
    "qwen2_moe": row(
        "qwen2_moe",
        QWEN2_MOE,
        bfloat16=True,
        int8_cache=True,
        blocks=SHARED_EXPERTS_BLOCKS,
        gguf=("qwen2moe", {}),
    ),
    "qwen2_moe dense layers, normalized, windows": row(
        "qwen2_moe",
        QWEN2_MOE,
        num_hidden_layers=4,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        norm_topk_prob=True,
        use_sliding_window=True,
        sliding_window=19,
        max_window_layers=3,
        qkv_bias=False,
    ),
    "olmoe": row(
        "olmoe",
        OLMOE,
        bfloat16=True,
        blocks={"intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2},
        gguf=("olmoe", {}),
    ),
    "olmoe normalized, groups of heads": row(
        "olmoe", OLMOE, norm_topk_prob=True, attention_bias=True, num_key_value_heads=3
    ),
    "gpt_oss": row("gpt_oss", GPT_OSS, bfloat16=True, int8_cache=True, blocks={}, gguf=("gpt-oss", {})),
    "gpt_oss other activation, no biases, as wide as long": row(
        "gpt_oss", GPT_OSS, swiglu_alpha=1.2, swiglu_limit=1.5, attention_bias=False, intermediate_size=48
    ),
    "glm4_moe": row(
        "glm4_moe",
        GLM4_MOE,
        attention_bias=True,
        routed_scaling_factor=2.5,
        bfloat16=True,
        int8_cache=True,
        blocks={},
        gguf=("glm4moe", {}),
    ),
    "glm4_moe norms of heads, groups, two shared": row(
        "glm4_moe",
        GLM4_MOE,
        use_qk_norm=True,
        n_group=3,
        topk_group=2,
        n_shared_experts=2,
        norm_topk_prob=False,
        tie_word_embeddings=True,
        gguf=("glm4moe", {}),
    ),
    "minimax_m2": row(
        "minimax_m2",
        MINIMAX,
        blocks={**MINIMAX, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 4},
        gguf=("minimax-m2", {}),
    ),
    # Near ties of experts would decide comparisons in bfloat16.
    "minimax_m2 all experts": row("minimax_m2", MINIMAX, num_experts_per_tok=6, bfloat16=True),
    "llama4 as Scout": row(
        "llama4_text",
        LLAMA4,
        rope_parameters=SCOUT_ROPE,
        bfloat16=True,
        int8_cache=True,
        blocks={**LOCAL_EXPERTS_BLOCKS, "head_dim": 16},
        gguf=(
            "llama4",
            {**LLAMA4_FIXED, "rope_parameters": {**SCOUT_ROPE, "original_max_position_embeddings": 8192}},
        ),
    ),
    "llama4 as Maverick, two experts, stacks as wide as long": row(
        "llama4_text",
        LLAMA4,
        use_qk_norm=False,
        interleave_moe_layer_step=2,
        num_experts_per_tok=2,
        intermediate_size=48,
        no_rope_layers=[1, 0, 0, 1],
        attention_bias=True,
        attention_chunk_size=64,
    ),
    "llama4 every other layer dense, tied": row(
        "llama4_text",
        LLAMA4,
        LLAMA4_FIXED,
        interleave_moe_layer_step=2,
        tie_word_embeddings=True,
        gguf=("llama4", {}),
    ),
    "llama4 as MobileLLM, dense, tied": row(
        "llama4_text",
        LLAMA4,
        num_hidden_layers=2,
        moe_layers=[],
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[0, 1],
        tie_word_embeddings=True,
        num_key_value_heads=6,
        attention_chunk_size=1,
    ),
    "granitemoe": row(
        "granitemoe",
        FEW_EXPERTS,
        GRANITE,
        blocks={**LOCAL_EXPERTS_BLOCKS, **GRANITE},
        gguf=("granitemoe", {}),
    ),
    "granitemoeshared tied, biases": row(
        "granitemoeshared",
        FEW_EXPERTS,
        GRANITE,
        shared_intermediate_size=40,
        tie_word_embeddings=True,
        attention_bias=True,
        bfloat16=True,
        blocks={**LOCAL_EXPERTS_BLOCKS, **GRANITE, "shared_intermediate_size": 64},
        gguf=("granitemoe", {}),
    ),
    "granite 4 with experts": row(
        "granitemoehybrid", GRANITE4, FEW_EXPERTS, shared_intermediate_size=40, position_embedding_type="rope"
    ),
    "ernie4_5_moe": row(
        "ernie4_5_moe",
        ERNIE,
        bfloat16=True,
        blocks={"moe_intermediate_size": 64, "moe_num_experts": 4, "moe_k": 2},
        gguf=("ernie4_5-moe", {}),
    ),
    "ernie4_5_moe every other layer, without shared ones, biases": row(
        "ernie4_5_moe",
        ERNIE,
        num_hidden_layers=4,
        moe_layer_start_index=1,
        moe_layer_end_index=2,
        moe_layer_interval=2,
        moe_num_shared_experts=0,
        use_bias=True,
        tie_word_embeddings=True,
    ),
    "phimoe": row(
        "phimoe",
        FEW_EXPERTS,
        attention_bias=True,
        lm_head_bias=True,
        bfloat16=True,
        blocks=LOCAL_EXPERTS_BLOCKS,
        gguf=("phimoe", {}),
    ),
    "phimoe longrope, few near": row(
        "phimoe", FEW_EXPERTS, router_jitter_noise=0.3, rope_parameters=PHIMOE_LONGROPE, sliding_window=33
    ),
    "deepseek_v2": row("deepseek_v2", LATENT, bfloat16=True, blocks=DENSE_LATENT_BLOCKS),
    "deepseek_v2 biases, latent queries, tied": row(
        "deepseek_v2", LATENT, q_lora_rank=20, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "deepseek_v2 yarn": row(
        "deepseek_v2", LATENT, rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}
    ),
    "deepseek_v3": row("deepseek_v3", LATENT, q_lora_rank=20, blocks=DENSE_LATENT_BLOCKS),
    "deepseek_v3 yarn, sharper scores": row(
        "deepseek_v3",
        LATENT,
        q_lora_rank=20,
        num_hidden_layers=3,
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
        bfloat16=True,
    ),
    "deepseek_v3 halves rotate, values wider than keys": row(
        "deepseek_v3", LATENT, rope_interleave=False, qk_nope_head_dim=8, v_head_dim=40, kv_lora_rank=48
    ),
    "deepseek_v2 experts": row("deepseek_v2", LATENT_EXPERTS),
    "deepseek_v2 experts in groups": row(
        "deepseek_v2", LATENT_EXPERTS, topk_method="group_limited_greedy", n_group=4, topk_group=2
    ),
    "deepseek_v3 experts in groups": row(
        "deepseek_v3", LATENT_EXPERTS, q_lora_rank=20, n_group=4, topk_group=2, bfloat16=True
    ),
    "deepseek_v3 experts, raw shares": row(
        "deepseek_v3", LATENT_EXPERTS, n_group=1, topk_group=1, norm_topk_prob=False, n_shared_experts=1
    ),
    "glm4_moe_lite experts": row(
        "glm4_moe_lite",
        {name: value for name, value in LATENT_EXPERTS.items() if name != "first_k_dense_replace"},
        q_lora_rank=28,
        n_shared_experts=1,
        blocks={**LATENT_BLOCKS, "mlp_layer_types": ["dense", "dense"]},
    ),
    "glm4_moe_lite": row(
        "glm4_moe_lite",
        LATENT_LITE,
        q_lora_rank=28,
        mlp_layer_types=["dense", "dense"],
        rms_norm_eps=0.01,
        bfloat16=True,
    ),
    "kimi_k2": row("kimi_k2", LATENT, blocks=DENSE_LATENT_BLOCKS, made_as="deepseek_v3"),
    "minicpm3": row(
        "minicpm3",
        LATENT_LITE,
        q_lora_rank=20,
        v_head_dim=None,
        scale_emb=3.0,
        dim_model_base=16,
        tie_word_embeddings=True,
        bfloat16=True,
        blocks={**LATENT_BLOCKS, "scale_emb": 3.0, "dim_model_base": 32},
    ),
    "minicpm3 longrope": row(
        "minicpm3",
        LATENT_LITE,
        qk_rope_head_dim=8,
        scale_emb=3.0,
        rope_parameters={**LONGROPE, "original_max_position_embeddings": 512},
    ),
    "deepseek_v32": row(
        "deepseek_v32", SPARSE, in_float32=("weights_proj",), blocks={**DENSE_LATENT_BLOCKS, **SPARSE_BLOCKS}
    ),
    "deepseek_v32 experts in groups, yarn": row(
        "deepseek_v32",
        SPARSE,
        {name: value for name, value in LATENT_EXPERTS.items() if name not in LATENT},
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        index_head_dim=16,
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
        in_float32=("weights_proj",),
    ),
    "glm_moe_dsa": row(
        "glm_moe_dsa",
        SPARSE,
        in_float32=("weights_proj",),
        blocks={**DENSE_LATENT_BLOCKS, **SPARSE_BLOCKS},
    ),
    "glm_moe_dsa choices of earlier layers, all fit": row(
        "glm_moe_dsa",
        SPARSE,
        num_hidden_layers=4,
        indexer_types=["full", "shared", "full", "shared"],
        mlp_layer_types=["dense"] * 4,
        index_topk=100,
        in_float32=("weights_proj",),
    ),
    "gemma4, shared keys, wide MLPs": row(
        "gemma4_text",
        GEMMA4,
        SHARING,
        bfloat16=True,
        int8_cache=True,
        wide={},
        blocks=STREAMS_BLOCKS | SHARING,
        gguf=("gemma4", {}),
    ),
    "gemma4, keys are values, own head, biases": row(
        "gemma4_text",
        GEMMA4,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        attention_bias=True,
        tie_word_embeddings=False,
        vocab_size_per_layer_input=110,
        gguf=(
            "gemma4",
            {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 96, "attention_bias": False},
        ),
    ),
    "gemma4 without inputs of layers, all rotate": row(
        "gemma4_text",
        GEMMA4,
        hidden_size_per_layer_input=0,
        num_hidden_layers=7,
        layer_types=None,
        rope_parameters=GEMMA4_ROPES | {FULL: {"rope_type": "default", "rope_theta": 1000.0}},
    ),
    "gemma4 experts beside the MLP": row(
        "gemma4_text",
        GEMMA4,
        {"hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3},
        moe_intermediate_size=24,
        gguf=("gemma4", {}),
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
    ),
    "gemma4_unified": row(
        "gemma4_unified_text",
        GEMMA4_UNIFIED,
        SHARING,
        attention_k_eq_v=True,
        num_key_value_heads=4,
        blocks=UNIFIED_BLOCKS,
    ),
    "gemma3n": row(
        "gemma3n_text",
        GEMMA3N,
        bfloat16=True,
        int8_cache=True,
        wide={},
        blocks={**GEMMA3N, "hidden_size": 64, "laurel_rank": 32, "hidden_size_per_layer_input": 32},
        gguf=("gemma3n", {"vocab_size_per_layer_input": 96}),
    ),
    "gemma3n, three streams, own widths, own cap": row(
        "gemma3n_text",
        GEMMA3N,
        altup_num_inputs=3,
        altup_active_idx=1,
        altup_correct_scale=False,
        intermediate_size=[80, 64, 80, 48, 96],
        num_kv_shared_layers=0,
        activation_sparsity_pattern=None,
        final_logit_softcapping=7.0,
        tie_word_embeddings=False,
    ),
    "qwen3_next": row(
        "qwen3_next",
        DELTA,
        QWEN_EXPERTS,
        seed=5,  # as for qwen3_5_moe_text: 5.6e-5 from transformers, with 0 1.0e-4
        mlp_only_layers=[1],
        norm_topk_prob=False,
        bfloat16=True,
        wide={"hidden_size": 96},
        in_float32=DELTA_FLOAT32,
        chunks=((37, 1, 2, 24),),
        blocks={**DELTA_BLOCKS, **SHARED_EXPERTS_BLOCKS},
    ),
    "qwen3_5_text": row(
        "qwen3_5_text",
        DELTA,
        seed=2,  # with 0 the first token has a product of q and k near 0, of which the norm makes 2e-4 in float32
        tie_word_embeddings=True,
        linear_num_key_heads=4,
        bfloat16=True,
        wide={"hidden_size": 96},
        in_float32=DELTA_FLOAT32,
        chunks=((1, 1, 1, 1, 60),),
        blocks=DELTA_BLOCKS,
    ),
    "qwen3_5_moe_text": row(
        "qwen3_5_moe_text",
        DELTA,
        QWEN_EXPERTS,
        seed=5,  # of 0 to 7 the nearest to float64, 7e-5 the engine and 1.8e-4 transformers; 6e-5 from each other
        linear_conv_kernel_dim=3,
        attention_bias=True,
        linear_num_value_heads=6,
        wide={"hidden_size": 96},
        chunks=((37, 1, 2, 24),),
        in_float32=DELTA_FLOAT32,
        blocks={**DELTA_BLOCKS, **SHARED_EXPERTS_BLOCKS},
    ),
    "lfm2_moe": row(
        "lfm2_moe",
        LFM2_MOE,
        chunks=((17, 1, 46),),
        blocks={**CONV_BLOCKS, **EXPERTS_BLOCKS, "num_dense_layers": 1},
    ),
    "lfm2_moe tied, no bias, raw shares": row(
        "lfm2_moe",
        LFM2_MOE,
        use_expert_bias=False,
        norm_topk_prob=False,
        routed_scaling_factor=1.7,
        tie_word_embeddings=True,
        chunks=((17, 1, 46),),
    ),
    "lfm2": row(
        "lfm2",
        LFM2,
        block_auto_adjust_ff_dim=False,
        bfloat16=True,
        int8_cache=True,
        wide={"hidden_size": 96},
        chunks=CHUNKS,
        blocks=CONV_BLOCKS,
    ),
    "lfm2 tied, ends with a convolution": row(
        "lfm2",
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "full_attention", "conv"],
        tie_word_embeddings=True,
        block_multiple_of=16,
        chunks=CHUNKS,
    ),
    "lfm2 four taps, biases, 9/3": row(
        "lfm2",
        LFM2,
        hidden_size=72,
        num_attention_heads=9,
        num_key_value_heads=3,
        conv_L_cache=4,
        conv_bias=True,
        block_ffn_dim_multiplier=1.3,
        block_multiple_of=8,
        bfloat16=True,
        chunks=CHUNKS,
    ),
    "lfm2 six taps": row(
        "lfm2", LFM2, conv_L_cache=6, block_multiple_of=16, hidden_size=96, bfloat16=True, chunks=CHUNKS
    ),
    "lfm2 two taps, first layer attends": row(
        "lfm2",
        num_hidden_layers=3,
        layer_types=["full_attention", "conv", "conv"],
        conv_L_cache=2,
        block_multiple_of=16,
        chunks=CHUNKS,
    ),
    "lfm2 only attention": row(
        "lfm2", num_hidden_layers=2, layer_types=["full_attention"] * 2, block_multiple_of=16, chunks=CHUNKS
    ),
    "mamba2 dense, no rotary": row(
        "granitemoehybrid",
        MAMBA,
        tie_word_embeddings=True,
        bfloat16=True,
        int8_cache=True,
        in_float32=MAMBA_FLOAT32,
        chunks=((1, 1, 1, 1, 60),),
    ),
    "mamba2 experts, groups, rotary, biases": row(
        "granitemoehybrid",
        MAMBA,
        MAMBA_EXPERTS,
        mamba_n_heads=6,
        mamba_n_groups=2,
        mamba_d_state=20,
        mamba_d_conv=3,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        mamba_chunk_size=16,
        position_embedding_type="rope",
        wide={"hidden_size": 96, "num_attention_heads": 6},
        in_float32=MAMBA_FLOAT32,
        chunks=((37, 1, 2, 24),),
    ),
    "nemotron_h": row(
        "nemotron_h",
        NEMOTRON,
        wide={"hidden_size": 96},
        chunks=((1, 1, 1, 1, 60),),
        in_float32=MAMBA_FLOAT32,
        blocks={
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
    ),
    "nemotron_h experts": row(
        "nemotron_h",
        NEMOTRON_EXPERTS,
        wide={"hidden_size": 96},
        chunks=((37, 1, 2, 24),),
        in_float32=MAMBA_FLOAT32,
    ),
    "nemotron_h experts of latents": row(
        "nemotron_h",
        NEMOTRON_EXPERTS,
        moe_latent_size=20,
        wide={"hidden_size": 96},
        chunks=((37, 1, 2, 24),),
        in_float32=MAMBA_FLOAT32,
    ),
    "nemotron_h ends with an MLP, biases": row(
        "nemotron_h",
        NEMOTRON,
        use_bias=True,
        mlp_bias=True,
        use_conv_bias=False,
        layers_block_type=["full_attention", "linear_attention", "linear_attention", "mlp"],
        num_hidden_layers=4,
        in_float32=MAMBA_FLOAT32,
        chunks=((37, 1, 2, 24),),
    ),
}
BUFFERS = ("correction_bias", "layer_scalar", "expert_bias")
"""Ends of the names of what transformers keeps as a buffer and the engine as a weight."""
BLOCK_ROWS = {row.model_type: row for row in FAMILIES.values() if row.blocks is not None}
"""The row of each family that has sizes of whole blocks."""
