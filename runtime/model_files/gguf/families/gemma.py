"""Gemma 3."""

from __future__ import annotations

from typing import Any, Final

from ...fields import Fields
from ...hf.families.family import windows_by_pattern
from ...layer_form import FOUR_NORMS
from .family import LAYER_NAMES, QK_NORM_NAMES, Facts, GGUFFamily

_GEMMA3_27B_LAYERS: Final = 62


def _gemma3(fields: Fields, arch: str) -> Facts:
    for key in ("gemma3.attn_logit_softcapping", "gemma3.final_logit_softcapping"):
        if fields.number(key, 0.0, 1e9, default=0.0):
            raise fields.error(key, fields.get(key), "capped scores and logits are not supported")
    num_layers = fields.integer("gemma3.block_count", 1, 1 << 12)
    pattern = fields.integer("gemma3.attention.sliding_window_pattern", 1, 1 << 12, default=6)
    facts: dict[str, Any] = {
        "qk_norm": True,
        "form": FOUR_NORMS,
        "float32_norms": True,
        "sliding_window": fields.integer("gemma3.attention.sliding_window", 1, 1 << 30),
        "windowed_layers": windows_by_pattern(pattern, num_layers),
        "local_rope_theta": fields.number("gemma3.rope.freq_base_swa", 1.0, 1e15, default=10000.0),
    }
    if num_layers == _GEMMA3_27B_LAYERS:  # the file does not say; the others scale by the head size
        hidden_size = fields.integer("gemma3.embedding_length", 1, 1 << 20)
        num_heads = fields.integer("gemma3.attention.head_count", 1, 1 << 12)
        facts["query_scale"] = (hidden_size / num_heads) ** -0.5
    return facts


_NAMES: Final = {
    **LAYER_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    **QK_NORM_NAMES,
}

FAMILIES: Final[dict[str, GGUFFamily]] = {"gemma3": GGUFFamily("gemma3_text", _gemma3, _NAMES)}
