"""Gemma 2 and 3."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ...fields import Fields
from ...hf.families.family import windows_by_pattern
from ...spec.attention_form import AttentionForm
from ...spec.layer_form import FOUR_NORMS
from .family import LAYER_NAMES, QK_NORM_NAMES, Facts, GGUFFamily

_GEMMA2_27B_LAYERS: Final = 46
_GEMMA3_27B_LAYERS: Final = 62


def _gemma2(fields: Fields, arch: str) -> Facts:
    num_layers = fields.integer("gemma2.block_count", 1, 1 << 12)
    return {
        "float32_norms": True,
        "sliding_window": fields.integer("gemma2.attention.sliding_window", 1, 1 << 30, default=4096),
        "windowed_layers": windows_by_pattern(2, num_layers),
        **_caps(fields, arch, 50.0, 30.0),
        **_scale_of_27b(fields, arch, num_layers == _GEMMA2_27B_LAYERS),
    }


def _caps(fields: Fields, arch: str, of_scores: float, of_logits: float) -> Facts:
    """The caps, and the form of the layers; 0 is no cap. The numbers are the defaults."""
    scores = fields.number(f"{arch}.attn_logit_softcapping", 0.0, 1e6, default=of_scores)
    logits = fields.number(f"{arch}.final_logit_softcapping", 0.0, 1e6, default=of_logits)
    return {
        "attention": AttentionForm(score_cap=scores or None),
        "form": structs.replace(FOUR_NORMS, logits_cap=logits or None),
    }


def _scale_of_27b(fields: Fields, arch: str, is_27b: bool) -> Facts:
    """The file does not have the scale: it is by the head size, except in the largest model."""
    if not is_27b:
        return {}
    hidden_size = fields.integer(f"{arch}.embedding_length", 1, 1 << 20)
    num_heads = fields.integer(f"{arch}.attention.head_count", 1, 1 << 12)
    return {"query_scale": (hidden_size / num_heads) ** -0.5}


def _gemma3(fields: Fields, arch: str) -> Facts:
    key = "gemma3.attn_logit_softcapping"
    if fields.number(key, 0.0, 1e9, default=0.0):
        raise fields.error(key, fields.get(key), "scores of Gemma 3 are not capped")
    num_layers = fields.integer("gemma3.block_count", 1, 1 << 12)
    pattern = fields.integer("gemma3.attention.sliding_window_pattern", 1, 1 << 12, default=6)
    return {
        "qk_norm": True,
        "float32_norms": True,
        "sliding_window": fields.integer("gemma3.attention.sliding_window", 1, 1 << 30),
        "windowed_layers": windows_by_pattern(pattern, num_layers),
        "local_rope_theta": fields.number("gemma3.rope.freq_base_swa", 1.0, 1e15, default=10000.0),
        **_caps(fields, arch, 0.0, 0.0),
        **_scale_of_27b(fields, arch, num_layers == _GEMMA3_27B_LAYERS),
    }


_GEMMA2_NAMES: Final = {
    **LAYER_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GEMMA3_NAMES: Final = {**_GEMMA2_NAMES, **QK_NORM_NAMES}

FAMILIES: Final[dict[str, GGUFFamily]] = {
    "gemma2": GGUFFamily("gemma2", _gemma2, _GEMMA2_NAMES, offset_norms=True),
    "gemma3": GGUFFamily("gemma3_text", _gemma3, _GEMMA3_NAMES, offset_norms=True),
}
