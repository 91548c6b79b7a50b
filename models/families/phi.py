"""Phi-3 and Phi-3.5-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import structs

from ..fields import Fields
from ..spec.experts_spec import MIXTRAL_NAMES, ExpertsSpec, Routing
from ..spec.layer_form import FUSED, Biases, LayerForm, WindowsSpec
from .family import GGUF, LAYER_NAMES, Facts, Family
from .gguf_readers import mixture_of
from .hf_readers import partial_rope_facts, rope_facts, window_everywhere
from .hf_rope import read_rope

_PHIMOE_THETA: Final = 1e6
PHIMOE_JITTER: Final = 0.01
"""`router_jitter_noise` of a file without it."""


def _phi3(fields: Fields) -> Facts:
    rope = read_rope(fields, kinds=("default", "longrope"), outer_original=True)
    return partial_rope_facts(fields, rope) | window_everywhere(fields) | {"form": FUSED}


def _phimoe(fields: Fields) -> Facts:
    rope = read_rope(fields, _PHIMOE_THETA, kinds=("default", "longrope"), outer_original=True)
    if rope.scaling.kind == "longrope":
        scaling = structs.replace(rope.scaling, attention_factor=_mscale(fields))
        rope = rope._replace(scaling=scaling)
    bias = fields.boolean("attention_bias", default=False)
    num_active = fields.integer("num_experts_per_tok", 1, 1 << 16, default=2)
    if num_active != 2:
        raise fields.error("num_experts_per_tok", num_active, "this router always chooses 2 experts")
    experts = ExpertsSpec(
        num_experts=fields.integer(fields.given("num_local_experts", "num_experts"), 2, 1 << 16, default=16),
        intermediate_size=fields.integer("intermediate_size", 1, 1 << 22),
        routing=phimoe_routing(fields.number("router_jitter_noise", 0.0, 1e3, default=PHIMOE_JITTER)),
        names=MIXTRAL_NAMES,
    )
    head_bias = fields.boolean("lm_head_bias", default=False)
    return (
        rope_facts(fields, rope)
        | window_everywhere(fields)
        | {
            "biases": Biases(qkv=bias, attention_out=bias),
            "form": LayerForm(norm="layer", norm_bias=True, head_bias=head_bias),
            "experts": experts,
        }
    )


def phimoe_routing(jitter: float) -> Routing:
    """The routing of Phi-3.5-MoE; `jitter`: by half of which a logit may be below the largest one."""
    return Routing(num_active=2, normalize=False, scores="mixer", mixer_tolerance=2 * jitter)


def _mscale(fields: Fields) -> float:
    """The factor of cos and sin, which the files give for short and for long texts."""
    name = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    values = fields.get(name)
    assert isinstance(values, Mapping)
    rope = Fields(fields.path, values, prefix=f"{name}.")
    short, long = (rope.number(f"{kind}_mscale", 1e-6, 1e6) for kind in ("short", "long"))
    if short != long:
        raise rope.error("long_mscale", long, f"expected short_mscale, {short:g}: one factor for all lengths")
    return long


def _phi3_gguf(fields: Fields, arch: str) -> Facts:
    return {**_windows(fields, arch), "form": FUSED}


def _phimoe_gguf(fields: Fields, arch: str) -> Facts:
    """Files have no `router_jitter_noise`; whether the head has a bias is seen from its tensor."""
    routing = phimoe_routing(PHIMOE_JITTER)
    experts = structs.replace(mixture_of(fields, arch, MIXTRAL_NAMES), routing=routing)
    form = LayerForm(norm="layer", norm_bias=True, head_bias=True)
    return {**_windows(fields, arch), "form": form, "experts": experts}


def _windows(fields: Fields, arch: str) -> Facts:
    window = fields.integer(f"{arch}.attention.sliding_window", 0, 1 << 30, default=0)
    num_layers = fields.integer(f"{arch}.block_count", 1, 1 << 12)
    return {"windows": WindowsSpec(size=window, layers=(True,) * num_layers)} if window else {}


_NAMES: Final = {
    **{module: stored for module, stored in LAYER_NAMES.items() if stored != "ffn_up"},
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}


FAMILIES: Final = (
    Family(
        "phi3",
        structure="llama",
        published="Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini",
        architecture="Phi3ForCausalLM",
        read=_phi3,
        gguf={"phi3": GGUF(_phi3_gguf, _NAMES, partial_rotary=True)},
    ),
    Family(
        "phi3_v",
        structure="llama",
        published="Phi-3-vision and Phi-3.5-vision, text only",
        architecture="Phi3VForCausalLM",
        read=_phi3,
        tensors={r"^model\.vision_embed_tokens\..*": ""},
    ),
    Family(
        "phimoe",
        structure="llama",
        published="Phi-3.5-MoE",
        architecture="PhimoeForCausalLM",
        read=_phimoe,
        gguf={"phimoe": GGUF(_phimoe_gguf, has_experts=True)},
    ),
)
