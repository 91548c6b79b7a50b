"""GLM-4: `chatglm` is that of 2024, `glm4` that of 2025, `glm4moe` GLM-4.5."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ...fields import Fields
from ...spec.layer_form import GLM4, PRE_NORMS
from .deepseek import SIGMOID, experts_after
from .family import LAYER_NAMES, QK_NORM_NAMES, Facts, GGUFFamily


def _glm4(fields: Fields, arch: str) -> Facts:
    return {"form": GLM4}


def _chatglm(fields: Fields, arch: str) -> Facts:
    return {"form": structs.replace(GLM4, norms=PRE_NORMS.norms)}


def _glm4_moe(fields: Fields, arch: str) -> Facts:
    """Layers that predict further tokens count as blocks of the file."""
    further = fields.integer(f"{arch}.nextn_predict_layers", 0, 1 << 8, default=0)
    num_layers = fields.integer(f"{arch}.block_count", further + 1, 1 << 12) - further
    facts = {"num_layers": num_layers, "num_mtp_layers": further, "qk_norm": True}
    return facts | experts_after(fields, arch, SIGMOID)


_FUSED_MLP: Final = {
    **{module: stored for module, stored in LAYER_NAMES.items() if stored not in ("ffn_gate", "ffn_up")},
    "mlp.gate_up_proj": "ffn_up",
}
_NAMES: Final = {
    **_FUSED_MLP,
    "post_self_attn_layernorm": "post_attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
_MOE_NAMES: Final = {
    **LAYER_NAMES,
    **QK_NORM_NAMES,
    "post_attention_layernorm": "post_attention_norm",
}
_CHATGLM_NAMES: Final = {
    **_FUSED_MLP,
    "self_attn.qkv_proj": "attn_qkv",
}  # of the first releases; later ones have three

FAMILIES: Final[dict[str, GGUFFamily]] = {
    "glm4": GGUFFamily("glm4", _glm4, _NAMES, partial_rotary=True),
    "chatglm": GGUFFamily("glm", _chatglm, _CHATGLM_NAMES, partial_rotary=True),
    "glm4moe": GGUFFamily("glm4_moe", _glm4_moe, _MOE_NAMES, partial_rotary=True, has_experts=True),
}
