"""OLMo 2 and OLMo 3, and OLMoE."""

from __future__ import annotations

from typing import Final

from ...fields import Fields
from ...spec.experts_spec import ExpertsSpec, Routing
from ...spec.layer_form import POST_NORMS_OVER_HEADS, PRE_NORMS_OVER_HEADS
from ...spec.model_spec import RopeScaling
from ..hf_rope import MAX_POSITIONS, read_rope, read_two_ropes
from .family import Facts, Family, rope_facts, windows_by_types

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
            "sliding_window": fields.integer("sliding_window", 1, MAX_POSITIONS, default=4096),
            "windowed_layers": windows_by_types(fields, _OLMO3_PATTERN),
            "local_rope_theta": None if same else local_theta,
        }
    )


def _layers(fields: Fields) -> Facts:
    bias = fields.boolean("attention_bias", default=False)
    return {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "qk_norm": True,
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


FAMILIES: Final[dict[str, Family]] = {
    "olmo2": Family("Olmo2ForCausalLM", _olmo2),
    "olmo3": Family("Olmo3ForCausalLM", _olmo3),
    "olmoe": Family("OlmoeForCausalLM", _olmoe),
}
