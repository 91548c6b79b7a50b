"""Mixtral."""

from __future__ import annotations

from typing import Final

from ..fields import Fields
from ..spec.experts_spec import MIXTRAL_NAMES, ExpertsSpec, Routing
from .family import Facts, Family
from .hf_readers import rope_facts, window_everywhere
from .hf_rope import read_rope

_THETA: Final = 1e6


def _mixtral(fields: Fields) -> Facts:
    return (
        rope_facts(fields, read_rope(fields, _THETA))
        | window_everywhere(fields)
        | {"experts": _experts(fields)}
    )


def _experts(fields: Fields) -> ExpertsSpec:
    name = fields.given("num_local_experts", "num_experts")
    return ExpertsSpec(
        num_experts=fields.integer(name, 1, 1 << 16, default=8),
        intermediate_size=fields.integer("intermediate_size", 1, 1 << 22),
        routing=Routing(num_active=fields.integer("num_experts_per_tok", 1, 1 << 16, default=2)),
        names=MIXTRAL_NAMES,
    )


FAMILIES: Final = (
    Family(
        "mixtral",
        structure="llama",
        published="Mixtral 8x7B, 8x22B",
        architecture="MixtralForCausalLM",
        read=_mixtral,
        stored_as="llama",
    ),
)
