"""OLMo 2 and OLMo 3, which share a GGUF architecture (files of OLMo 3 have a window), and OLMoE."""

from __future__ import annotations

from typing import Final

from ..fields import Fields
from ..spec.experts_spec import ExpertNames, ExpertsSpec, Routing
from ..spec.layer_form import POST_NORMS_OVER_HEADS, PRE_NORMS_OVER_HEADS, Biases, RopeScaling, WindowsSpec
from .family import GGUF, LAYER_NAMES, QK_NORM_NAMES, Facts, Family
from .gguf_readers import mixture_of, windowed_layers
from .hf_readers import rope_facts, windows_by_types
from .hf_rope import MAX_POSITIONS, read_rope, read_two_ropes

_OLMO3_THETA: Final = 500_000.0
_OLMO3_PATTERN: Final = 4  # every fourth layer has no window


def _olmo2(fields: Fields) -> Facts:
    return rope_facts(fields, read_rope(fields)) | _layers(fields)


def _olmo3(fields: Fields) -> Facts:
    rope, local_theta = read_two_ropes(fields, _OLMO3_THETA, "rope_theta", _OLMO3_THETA)
    same = rope.scaling == RopeScaling() and rope.theta == local_theta
    return (
        rope_facts(fields, rope)
        | _layers(fields)
        | {
            "windows": WindowsSpec(
                size=fields.integer("sliding_window", 1, MAX_POSITIONS, default=4096),
                layers=windows_by_types(fields, _OLMO3_PATTERN),
                rope_theta=None if same else local_theta,
            ),
        }
    )


def _layers(fields: Fields) -> Facts:
    bias = fields.boolean("attention_bias", default=False)
    return {
        "biases": Biases(qkv=bias, attention_out=bias),
        "form": POST_NORMS_OVER_HEADS,
    }


def _olmoe(fields: Fields) -> Facts:
    if fields.get("clip_qkv") is not None:
        raise fields.error(
            "clip_qkv", fields.get("clip_qkv"), "clipped queries, keys and values are not supported"
        )
    experts = ExpertsSpec(
        num_experts=fields.integer(fields.given("num_experts", "num_local_experts"), 1, 1 << 16, default=64),
        intermediate_size=fields.integer("intermediate_size", 1, 1 << 22),
        routing=Routing(
            num_active=fields.integer("num_experts_per_tok", 1, 1 << 16, default=8),
            normalize=fields.boolean("norm_topk_prob", default=False),
        ),
    )
    facts = rope_facts(fields, read_rope(fields)) | _layers(fields)
    return facts | {"form": PRE_NORMS_OVER_HEADS, "experts": experts}


_PATTERN: Final = 4  # every fourth layer has no window


def _olmo2_gguf(fields: Fields, arch: str) -> Facts:
    facts: Facts = {"form": POST_NORMS_OVER_HEADS}
    key = f"{arch}.attention.sliding_window"
    window = fields.integer(key, 0, 1 << 30, default=0)
    if not window:
        return facts
    theta = fields.number(f"{arch}.rope.freq_base", 1.0, 1e15, default=10000.0)
    return facts | {
        "model_type": "olmo3",
        "windows": WindowsSpec(
            size=window,
            layers=windowed_layers(fields, arch, _PATTERN),
            rope_theta=fields.number(f"{arch}.rope.freq_base_swa", 1.0, 1e15, default=theta),
        ),
    }


def _olmoe_gguf(fields: Fields, arch: str) -> Facts:
    experts = mixture_of(fields, arch, ExpertNames(), normalize=False)
    return {"form": PRE_NORMS_OVER_HEADS, "experts": experts}


NAMES: Final = {
    **{module: stored for module, stored in LAYER_NAMES.items() if "layernorm" not in module},
    **QK_NORM_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


FAMILIES: Final = (
    Family(
        "olmo2",
        structure="post_norm",
        published="OLMo 2",
        architecture="Olmo2ForCausalLM",
        read=_olmo2,
        gguf={"olmo2": GGUF(_olmo2_gguf, NAMES)},
    ),
    Family(
        "olmo3",
        structure="post_norm",
        published="OLMo 3",
        architecture="Olmo3ForCausalLM",
        read=_olmo3,
        stored_as="olmo2",
    ),
    Family(
        "olmoe",
        structure="llama",
        published="OLMoE",
        architecture="OlmoeForCausalLM",
        read=_olmoe,
        gguf={"olmoe": GGUF(_olmoe_gguf, {**LAYER_NAMES, **QK_NORM_NAMES}, has_experts=True)},
    ),
)
