"""gpt-oss."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ...fields import Fields
from ...hf.families.gpt_oss import NAMES
from ...spec.attention_form import AttentionForm
from ...spec.experts_spec import ClampedSwiGLU
from ..gguf_rope import yarn_scaling
from .family import LAYER_NAMES, Facts, GGUFFamily, windowed_layers
from .mixtral import mixture_of


def _gpt_oss(fields: Fields, arch: str) -> Facts:
    experts = structs.replace(mixture_of(fields, arch, NAMES), has_bias=True, clamp=ClampedSwiGLU())
    facts: Facts = {
        "attention": AttentionForm(sinks=True),
        "sliding_window": fields.integer(f"{arch}.attention.sliding_window", 1, 1 << 30),
        "windowed_layers": windowed_layers(fields, arch, default=2),
        "experts": experts,
    }
    if (
        fields.get(f"{arch}.rope.scaling.type") == "yarn"
    ):  # its blend does not begin and end at whole dimensions
        facts["rope_scaling"] = structs.replace(yarn_scaling(fields, arch), truncate=False)
    return facts


_NAMES: Final = {**LAYER_NAMES, "post_attention_layernorm": "post_attention_norm"}

FAMILIES: Final[dict[str, GGUFFamily]] = {
    "gpt-oss": GGUFFamily("gpt_oss", _gpt_oss, _NAMES, has_experts=True)
}
