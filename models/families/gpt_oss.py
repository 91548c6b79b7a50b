"""gpt-oss: windows in every other layer, sinks, and experts with biases and a clamped activation."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ..fields import Fields
from ..spec.experts_spec import ClampedSwiGLU, ExpertNames, ExpertsSpec, Routing
from ..spec.layer_form import AttentionForm, Biases, WindowsSpec
from .family import GGUF, LAYER_NAMES, Facts, Family
from .gguf_readers import mixture_of, windowed_layers, yarn_scaling
from .hf_readers import rope_facts, windows_by_types
from .hf_rope import MAX_POSITIONS, read_rope

_THETA: Final = 150_000.0
NAMES: Final = ExpertNames(router="router", stacks_in_turn=True)


def _gpt_oss(fields: Fields) -> Facts:
    if not fields.get("rope_parameters") and not fields.get("rope_scaling"):
        raise fields.error("rope_parameters", fields.get("rope_parameters"), "expected an object with yarn")
    bias = fields.boolean("attention_bias", default=True)
    return rope_facts(fields, read_rope(fields, _THETA)) | {
        "biases": Biases(qkv=bias, attention_out=bias),
        "attention": AttentionForm(sinks=True),
        "windows": WindowsSpec(
            size=fields.integer("sliding_window", 1, MAX_POSITIONS, default=128),
            layers=windows_by_types(fields, 2),
        ),
        "experts": _experts(fields),
    }


def _experts(fields: Fields) -> ExpertsSpec:
    active = fields.given("num_experts_per_tok", "experts_per_token")
    limit = fields.number("swiglu_limit", 1e-3, 1e6, default=7.0)
    return ExpertsSpec(
        num_experts=fields.integer(fields.given("num_local_experts", "num_experts"), 1, 1 << 16),
        intermediate_size=fields.integer("intermediate_size", 1, 1 << 22),
        routing=Routing(num_active=fields.integer(active, 1, 1 << 16, default=4)),
        has_bias=True,
        clamp=ClampedSwiGLU(
            alpha=fields.number("swiglu_alpha", 1e-3, 1e3, default=1.702), limit=limit, gate_limit=limit
        ),
        names=NAMES,
    )


def _gpt_oss_gguf(fields: Fields, arch: str) -> Facts:
    experts = structs.replace(mixture_of(fields, arch, NAMES), has_bias=True, clamp=ClampedSwiGLU())
    facts: Facts = {
        "attention": AttentionForm(sinks=True),
        "windows": WindowsSpec(
            size=fields.integer(f"{arch}.attention.sliding_window", 1, 1 << 30),
            layers=windowed_layers(fields, arch, default=2),
        ),
        "experts": experts,
    }
    if (
        fields.get(f"{arch}.rope.scaling.type") == "yarn"
    ):  # its blend does not begin and end at whole dimensions
        facts["rope_scaling"] = structs.replace(yarn_scaling(fields, arch), truncate=False)
    return facts


_NAMES: Final = {**LAYER_NAMES, "post_attention_layernorm": "post_attention_norm"}


FAMILIES: Final = (
    Family(
        "gpt_oss",
        structure="llama",
        published="gpt-oss-20b, gpt-oss-120b",
        architecture="GptOssForCausalLM",
        read=_gpt_oss,
        head_dim=64,
        gguf={"gpt-oss": GGUF(_gpt_oss_gguf, _NAMES, has_experts=True)},
    ),
)
