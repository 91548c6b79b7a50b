"""GLM-4: `chatglm` is that of 2024, `glm4` that of 2025."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ...fields import Fields
from ...layer_form import GLM4, PRE_NORMS
from .family import LAYER_NAMES, Facts, GGUFFamily


def _glm4(fields: Fields, arch: str) -> Facts:
    return {"form": GLM4}


def _chatglm(fields: Fields, arch: str) -> Facts:
    return {"form": structs.replace(GLM4, norms=PRE_NORMS.norms)}


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
_CHATGLM_NAMES: Final = {
    **_FUSED_MLP,
    "self_attn.qkv_proj": "attn_qkv",
}  # of the first releases; later ones have three

FAMILIES: Final[dict[str, GGUFFamily]] = {
    "glm4": GGUFFamily("glm4", _glm4, _NAMES, partial_rotary=True),
    "chatglm": GGUFFamily("glm", _chatglm, _CHATGLM_NAMES, partial_rotary=True),
}
