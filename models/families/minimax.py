"""MiniMax-M2, M2.1, M2.5, M2.7: experts in all layers, norms of q and k over all heads, part of each head rotates."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ..fields import Fields
from ..spec.experts_spec import MIXTRAL_NAMES, ExpertsSpec, Routing
from ..spec.layer_form import PRE_NORMS_OVER_HEADS
from ..spec.model_spec import FilesSpec
from .family import GGUF, LAYER_NAMES, QK_NORM_NAMES, Facts, Family
from .gguf_readers import mixture_of
from .hf_readers import partial_rope_facts
from .hf_rope import read_rope

_THETA: Final = 5_000_000.0
_HEAD_DIM: Final = 128
_NAMES: Final = structs.replace(MIXTRAL_NAMES, bias="e_score_correction_bias")
_ONLY: Final = {
    "scoring_func": "sigmoid",
    "qk_norm_type": "per_layer",
    "use_qk_norm": True,
    "use_routing_bias": True,
    "shared_intermediate_size": 0,
}
_SIGMOID: Final = 2


def _minimax_m2(fields: Fields) -> Facts:
    """Published files have the rotating part of a head as `rotary_dim`."""
    for name, only in _ONLY.items():
        if fields.get(name) not in (None, only):
            raise fields.error(name, fields.get(name), f"only {only!r} is supported")
    kinds = fields.get("attn_type_list")
    if isinstance(kinds, list) and any(kind != 1 for kind in kinds):
        raise fields.error("attn_type_list", kinds, "only 1 is supported: softmax attention in all layers")
    head_dim = fields.integer("head_dim", 1, 1 << 12, default=_HEAD_DIM)
    rotary_dim = fields.integer("rotary_dim", 1, head_dim, default=head_dim)
    rope = read_rope(fields, _THETA, default_partial=rotary_dim / head_dim)
    experts = ExpertsSpec(
        num_experts=fields.integer(fields.given("num_local_experts", "num_experts"), 1, 1 << 16, default=256),
        intermediate_size=fields.integer("intermediate_size", 1, 1 << 22),
        routing=_routing(fields.integer("num_experts_per_tok", 1, 1 << 16, default=8)),
        names=_NAMES,
    )
    return partial_rope_facts(fields, rope, _HEAD_DIM) | {
        "form": PRE_NORMS_OVER_HEADS,
        "experts": experts,
        "files": FilesSpec(num_mtp_layers=fields.integer("num_mtp_modules", 0, 1 << 8, default=0)),
    }


def _routing(num_active: int) -> Routing:
    return Routing(num_active=num_active, scores="sigmoid", has_bias=True, float32_logits=True)


def _minimax_m2_gguf(fields: Fields, arch: str) -> Facts:
    key = f"{arch}.expert_gating_func"
    if fields.integer(key, 0, 1 << 8, default=_SIGMOID) != _SIGMOID:
        raise fields.error(key, fields.get(key), f"only {_SIGMOID} (sigmoid) is supported")
    experts = mixture_of(fields, arch, _NAMES)
    experts = structs.replace(experts, routing=_routing(experts.num_active))
    return {"form": PRE_NORMS_OVER_HEADS, "experts": experts}


FAMILIES: Final = (
    Family(
        "minimax_m2",
        structure="llama",
        published="MiniMax-M2, M2.1, M2.5, M2.7",
        architecture="MiniMaxM2ForCausalLM",
        read=_minimax_m2,
        head_dim=_HEAD_DIM,
        gguf={
            "minimax-m2": GGUF(
                _minimax_m2_gguf, {**LAYER_NAMES, **QK_NORM_NAMES}, partial_rotary=True, has_experts=True
            )
        },
    ),
)
