"""Qwen2, Qwen3 and Qwen3-MoE."""

from __future__ import annotations

from typing import Final

from ...fields import Fields
from ...model_spec import ExpertsSpec
from .family import LAYER_NAMES, QK_NORM_NAMES, Facts, GGUFFamily, no_facts


def _qwen3(fields: Fields, arch: str) -> Facts:
    return {"qk_norm": True}


def _qwen3_moe(fields: Fields, arch: str) -> Facts:
    experts = ExpertsSpec(
        num_experts=fields.integer(f"{arch}.expert_count", 1, 1 << 16),
        num_active=fields.integer(f"{arch}.expert_used_count", 1, 1 << 16),
        intermediate_size=fields.integer(f"{arch}.expert_feed_forward_length", 1, 1 << 22),
        normalize=True,  # llama.cpp always normalizes
    )
    return {"qk_norm": True, "experts": experts}


_QWEN3_NAMES: Final = {**LAYER_NAMES, **QK_NORM_NAMES}

FAMILIES: Final[dict[str, GGUFFamily]] = {
    "qwen2": GGUFFamily("qwen2", no_facts),
    "qwen3": GGUFFamily("qwen3", _qwen3, _QWEN3_NAMES),
    # Of multimodal models, whose tower is a file of its own; for text their M-RoPE is the rope of the others.
    "qwen2vl": GGUFFamily("qwen2", no_facts),
    "qwen3vl": GGUFFamily("qwen3", _qwen3, _QWEN3_NAMES),
    "qwen3moe": GGUFFamily("qwen3_moe", _qwen3_moe, _QWEN3_NAMES, has_experts=True),
}
