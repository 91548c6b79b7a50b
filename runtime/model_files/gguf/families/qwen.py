"""Qwen2 and Qwen3, dense and as mixtures of experts."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ...experts_spec import ExpertNames
from ...fields import Fields
from .family import LAYER_NAMES, QK_NORM_NAMES, Facts, GGUFFamily, no_facts
from .mixtral import mixture_of


def _qwen3(fields: Fields, arch: str) -> Facts:
    return {"qk_norm": True}


def _qwen3_moe(fields: Fields, arch: str) -> Facts:
    return {"qk_norm": True, "experts": mixture_of(fields, arch, ExpertNames())}  # always normalized


def _qwen2_moe(fields: Fields, arch: str) -> Facts:
    experts = structs.replace(
        mixture_of(fields, arch, ExpertNames(shared="shared_expert"), normalize=False),
        shared_size=fields.integer(f"{arch}.expert_shared_feed_forward_length", 1, 1 << 22),
        has_shared_gate=True,
    )
    return {"experts": experts}


_QWEN3_NAMES: Final = {**LAYER_NAMES, **QK_NORM_NAMES}

FAMILIES: Final[dict[str, GGUFFamily]] = {
    "qwen2": GGUFFamily("qwen2", no_facts),
    "qwen3": GGUFFamily("qwen3", _qwen3, _QWEN3_NAMES),
    # Of multimodal models, whose tower is a file of its own; for text their M-RoPE is the rope of the others.
    "qwen2vl": GGUFFamily("qwen2", no_facts),
    "qwen3vl": GGUFFamily("qwen3", _qwen3, _QWEN3_NAMES),
    "qwen2moe": GGUFFamily("qwen2_moe", _qwen2_moe, has_experts=True),
    "qwen3moe": GGUFFamily("qwen3_moe", _qwen3_moe, _QWEN3_NAMES, has_experts=True),
}
