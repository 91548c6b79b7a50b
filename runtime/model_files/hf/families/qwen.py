"""Qwen2 and Qwen3, dense and as mixtures of experts."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ...experts_spec import ExpertNames, ExpertsSpec, Routing
from ...fields import Fields
from ..hf_rope import MAX_POSITIONS, read_rope
from .family import Facts, Family, layer_types, rope_facts, window_everywhere


def _qwen2(fields: Fields) -> Facts:
    return rope_facts(fields, read_rope(fields)) | _qwen_windows(fields) | {"attention_bias": True}


def _qwen3(fields: Fields) -> Facts:
    return _qwen3_attention(fields) | _qwen_windows(fields)


def _qwen2_moe(fields: Fields) -> Facts:
    experts = structs.replace(
        _experts(fields),
        shared_size=fields.integer("shared_expert_intermediate_size", 1, 1 << 22, default=5632),
        has_shared_gate=True,
        names=ExpertNames(shared="shared_expert"),
    )
    windows = _qwen2_moe_windows(fields) if fields.boolean("use_sliding_window", default=False) else {}
    return (
        rope_facts(fields, read_rope(fields))
        | windows
        | {"attention_bias": fields.boolean("qkv_bias", default=True), "experts": experts}
    )


def _qwen2_moe_windows(fields: Fields) -> Facts:
    """Without `layer_types`, every other layer before `max_window_layers` has a window."""
    if fields.get("sliding_window") is None:
        return {}
    if fields.get("layer_types") is not None:
        windowed = layer_types(fields)
    else:
        last = fields.integer("max_window_layers", 0, 1 << 12, default=28)
        num_layers = fields.integer("num_hidden_layers", 1, 1 << 12)
        windowed = tuple(layer % 2 == 0 and layer < last for layer in range(num_layers))
    if not any(windowed):
        return {}
    return {
        "sliding_window": fields.integer("sliding_window", 1, MAX_POSITIONS),
        "windowed_layers": windowed,
    }


def _qwen3_moe(fields: Fields) -> Facts:
    windows = window_everywhere(fields) if fields.boolean("use_sliding_window", default=False) else {}
    return _qwen3_attention(fields) | windows | {"experts": _experts(fields)}


def _experts(fields: Fields) -> ExpertsSpec:
    name = fields.given("num_experts", "num_local_experts")
    num_layers = fields.integer("num_hidden_layers", 1, 1 << 12)
    step = fields.integer("decoder_sparse_step", 1, 1 << 12, default=1)
    dense = set(fields.integers("mlp_only_layers", 0, 1 << 12))
    dense |= {layer for layer in range(num_layers) if (layer + 1) % step}
    return ExpertsSpec(
        num_experts=fields.integer(name, 1, 1 << 16),
        intermediate_size=fields.integer("moe_intermediate_size", 1, 1 << 22),
        routing=Routing(
            num_active=fields.integer("num_experts_per_tok", 1, 1 << 16),
            normalize=fields.boolean("norm_topk_prob", default=False),
        ),
        dense_layers=tuple(sorted(layer for layer in dense if layer < num_layers)),
    )


def _qwen3_attention(fields: Fields) -> Facts:
    bias = fields.boolean("attention_bias", default=False)
    return rope_facts(fields, read_rope(fields)) | {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "qk_norm": True,
    }


def _qwen_windows(fields: Fields) -> Facts:
    """Layers from `max_window_layers` on have a window, if windows are enabled."""
    if not fields.boolean("use_sliding_window", default=False) or fields.get("sliding_window") is None:
        return {}
    if fields.get("layer_types") is not None:
        windowed = layer_types(fields)
    else:
        first = fields.integer("max_window_layers", 0, 1 << 12, default=28)
        windowed = tuple(layer >= first for layer in range(fields.integer("num_hidden_layers", 1, 1 << 12)))
    if not any(windowed):
        return {}
    return {
        "sliding_window": fields.integer("sliding_window", 1, MAX_POSITIONS),
        "windowed_layers": windowed,
    }


FAMILIES: Final[dict[str, Family]] = {
    "qwen2": Family("Qwen2ForCausalLM", _qwen2),
    "qwen3": Family("Qwen3ForCausalLM", _qwen3, head_dim=128),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", _qwen2_moe),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", _qwen3_moe),
}
