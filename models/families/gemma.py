"""Gemma 1, 2 and 3."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ..fields import Fields
from ..spec.layer_form import FOUR_NORMS, AttentionForm, Biases, LayerForm, WindowsSpec
from .family import GGUF, LAYER_NAMES, QK_NORM_NAMES, Facts, Family
from .hf_readers import layer_types, rope_facts, windows_by_pattern, windows_by_types
from .hf_rope import MAX_POSITIONS, read_rope, read_two_ropes

_GEMMA3_PATTERN: Final = 6  # every sixth layer has no window


_TWO_NORMS: Final = LayerForm(float32_norms=True)


def _gemma(fields: Fields) -> Facts:
    _refuse_bidirectional(fields)
    bias = fields.boolean("attention_bias", default=False)
    return rope_facts(fields, read_rope(fields)) | {
        "biases": Biases(qkv=bias, attention_out=bias),
        "form": _TWO_NORMS,
    }


def _gemma2(fields: Fields) -> Facts:
    _refuse_bidirectional(fields)
    bias = fields.boolean("attention_bias", default=False)
    return rope_facts(fields, read_rope(fields)) | {
        "biases": Biases(qkv=bias, attention_out=bias),
        "windows": WindowsSpec(
            size=fields.integer("sliding_window", 1, MAX_POSITIONS, default=4096),
            layers=windows_by_types(fields, 2),
        ),
        **_caps(fields, 50.0, 30.0),
    }


def _caps(
    fields: Fields, of_scores: float | None, of_logits: float | None, *, qk_norm: bool = False
) -> Facts:
    """The scale and the caps, and the form of the layers; the arguments are the defaults."""
    scalar = fields.number("query_pre_attn_scalar", 1e-6, 1e9, default=256.0)
    cap = cap_of(fields, "final_logit_softcapping", of_logits)
    return {
        "attention": AttentionForm(
            query_scale=float(scalar**-0.5),
            score_cap=cap_of(fields, "attn_logit_softcapping", of_scores),
        ),
        "form": structs.replace(FOUR_NORMS, float32_norms=True, qk_norm=qk_norm, logits_cap=cap),
    }


def cap_of(fields: Fields, name: str, default: float | None) -> float | None:
    """A cap; null: there is none, which is not the same as no field."""
    if fields.get(name) is None and (name in fields or default is None):
        return None
    return fields.number(name, 1e-3, 1e6, default=default)


def _refuse_bidirectional(fields: Fields) -> None:
    if fields.get("use_bidirectional_attention") != "vision" and fields.boolean(
        "use_bidirectional_attention", default=False
    ):
        raise fields.error(
            "use_bidirectional_attention", True, "only attention to earlier tokens is supported"
        )


def _gemma3(fields: Fields) -> Facts:
    _refuse_bidirectional(fields)
    cap = fields.get("attn_logit_softcapping")
    if cap is not None:
        raise fields.error(
            "attn_logit_softcapping", cap, "scores of Gemma 3 are not capped; remove the field"
        )
    rope, local_theta = read_two_ropes(fields, 1_000_000.0, "rope_local_base_freq", 10_000.0)
    bias = fields.boolean("attention_bias", default=False)
    return rope_facts(fields, rope) | {
        "biases": Biases(qkv=bias, attention_out=bias),
        "windows": WindowsSpec(
            size=fields.integer("sliding_window", 1, MAX_POSITIONS, default=4096),
            layers=_gemma3_windows(fields),
            rope_theta=local_theta,
        ),
        **_caps(fields, None, None, qk_norm=True),
    }


def _gemma3_windows(fields: Fields) -> tuple[bool, ...]:
    if fields.get("layer_types") is not None:
        return layer_types(fields)
    name, saved = "sliding_window_pattern", "_sliding_window_pattern"
    pattern = fields.integer(name, 1, 1 << 12, default=_GEMMA3_PATTERN)
    # transformers writes the second name beside `layer_types` and never reads it.
    if fields.integer(saved, 1, 1 << 12, default=pattern) != pattern:
        raise fields.error(
            saved, fields.get(saved), f"but {name} is {fields.get(name)} and {pattern} is used; set {name}"
        )
    return windows_by_pattern(pattern, fields.integer("num_hidden_layers", 1, 1 << 12))


_GEMMA2_27B_LAYERS: Final = 46
_GEMMA3_27B_LAYERS: Final = 62


def _gemma_gguf(fields: Fields, arch: str) -> Facts:
    return {"form": _TWO_NORMS}


def _gemma2_gguf(fields: Fields, arch: str) -> Facts:
    num_layers = fields.integer("gemma2.block_count", 1, 1 << 12)
    return {
        "windows": WindowsSpec(
            size=fields.integer("gemma2.attention.sliding_window", 1, 1 << 30, default=4096),
            layers=windows_by_pattern(2, num_layers),
        ),
        **_caps_gguf(fields, arch, 50.0, 30.0, is_27b=num_layers == _GEMMA2_27B_LAYERS),
    }


def _caps_gguf(
    fields: Fields, arch: str, of_scores: float, of_logits: float, *, is_27b: bool, qk_norm: bool = False
) -> Facts:
    """The scale and the caps, and the form of the layers; 0 is no cap. The numbers are the defaults.

    The file does not have the scale: it is by the head size, except in the largest model.
    """
    scale = None
    if is_27b:
        hidden_size = fields.integer(f"{arch}.embedding_length", 1, 1 << 20)
        scale = (hidden_size / fields.integer(f"{arch}.attention.head_count", 1, 1 << 12)) ** -0.5
    scores = fields.number(f"{arch}.attn_logit_softcapping", 0.0, 1e6, default=of_scores)
    logits = fields.number(f"{arch}.final_logit_softcapping", 0.0, 1e6, default=of_logits)
    return {
        "attention": AttentionForm(query_scale=scale, score_cap=scores or None),
        "form": structs.replace(FOUR_NORMS, float32_norms=True, qk_norm=qk_norm, logits_cap=logits or None),
    }


def _gemma3_gguf(fields: Fields, arch: str) -> Facts:
    key = "gemma3.attn_logit_softcapping"
    if fields.number(key, 0.0, 1e9, default=0.0):
        raise fields.error(key, fields.get(key), "scores of Gemma 3 are not capped")
    num_layers = fields.integer("gemma3.block_count", 1, 1 << 12)
    pattern = fields.integer("gemma3.attention.sliding_window_pattern", 1, 1 << 12, default=6)
    return {
        "windows": WindowsSpec(
            size=fields.integer("gemma3.attention.sliding_window", 1, 1 << 30),
            layers=windows_by_pattern(pattern, num_layers),
            rope_theta=fields.number("gemma3.rope.freq_base_swa", 1.0, 1e15, default=10000.0),
        ),
        **_caps_gguf(fields, arch, 0.0, 0.0, qk_norm=True, is_27b=num_layers == _GEMMA3_27B_LAYERS),
    }


_GEMMA2_NAMES: Final = {
    **LAYER_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GEMMA3_NAMES: Final = {**_GEMMA2_NAMES, **QK_NORM_NAMES}


FAMILIES: Final = (
    Family(
        "gemma",
        structure="gemma",
        published="Gemma 2B, 7B; Gemma 1.1; CodeGemma",
        architecture="GemmaForCausalLM",
        read=_gemma,
        activation="gelu_pytorch_tanh",
        old_activation="gelu",
        tied=True,
        head_dim=256,
        gguf={"gemma": GGUF(_gemma_gguf, offset_norms=True)},
    ),
    Family(
        "gemma2",
        structure="gemma",
        published="Gemma 2",
        architecture="Gemma2ForCausalLM",
        read=_gemma2,
        activation="gelu_pytorch_tanh",
        tied=True,
        head_dim=256,
        gguf={"gemma2": GGUF(_gemma2_gguf, _GEMMA2_NAMES, offset_norms=True)},
    ),
    Family(
        "gemma3_text",
        structure="gemma",
        published="Gemma 3",
        architecture="Gemma3ForCausalLM",
        read=_gemma3,
        activation="gelu_pytorch_tanh",
        tied=True,
        head_dim=256,
        body="Gemma3TextModel",
        gguf={"gemma3": GGUF(_gemma3_gguf, _GEMMA3_NAMES, offset_norms=True)},
    ),
)
