"""OLMo 2 and OLMo 3, which share an architecture (files of OLMo 3 have a window), and OLMoE."""

from __future__ import annotations

from typing import Final

from ...fields import Fields
from ...spec.experts_spec import ExpertNames
from ...spec.layer_form import POST_NORMS_OVER_HEADS, PRE_NORMS_OVER_HEADS
from .family import LAYER_NAMES, QK_NORM_NAMES, Facts, GGUFFamily, windowed_layers
from .mixtral import mixture_of

_PATTERN: Final = 4  # every fourth layer has no window


def _olmo2(fields: Fields, arch: str) -> Facts:
    facts: Facts = {"qk_norm": True, "form": POST_NORMS_OVER_HEADS}
    key = f"{arch}.attention.sliding_window"
    window = fields.integer(key, 0, 1 << 30, default=0)
    if not window:
        return facts
    theta = fields.number(f"{arch}.rope.freq_base", 1.0, 1e15, default=10000.0)
    return facts | {
        "model_type": "olmo3",
        "sliding_window": window,
        "windowed_layers": windowed_layers(fields, arch, _PATTERN),
        "local_rope_theta": fields.number(f"{arch}.rope.freq_base_swa", 1.0, 1e15, default=theta),
    }


def _olmoe(fields: Fields, arch: str) -> Facts:
    experts = mixture_of(fields, arch, ExpertNames(), normalize=False)
    return {"qk_norm": True, "form": PRE_NORMS_OVER_HEADS, "experts": experts}


NAMES: Final = {
    **{module: stored for module, stored in LAYER_NAMES.items() if "layernorm" not in module},
    **QK_NORM_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}

FAMILIES: Final[dict[str, GGUFFamily]] = {
    "olmo2": GGUFFamily("olmo2", _olmo2, NAMES, also=("olmo3",)),
    "olmoe": GGUFFamily("olmoe", _olmoe, {**LAYER_NAMES, **QK_NORM_NAMES}, has_experts=True),
}
