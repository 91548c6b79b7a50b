"""ERNIE 4.5, dense and with experts."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ...fields import Fields
from ...hf.families.ernie import FORM, routing
from ...spec.experts_spec import ERNIE_NAMES
from .family import Facts, GGUFFamily
from .mixtral import mixture_of


def _ernie4_5(fields: Fields, arch: str) -> Facts:
    return {"form": FORM}


def _ernie4_5_moe(fields: Fields, arch: str) -> Facts:
    num_layers = fields.integer(f"{arch}.block_count", 1, 1 << 12)
    first = fields.integer(f"{arch}.leading_dense_block_count", 0, 1 << 12, default=0)
    step = fields.integer(f"{arch}.interleave_moe_layer_step", 1, 1 << 12)
    experts = mixture_of(fields, arch, ERNIE_NAMES)
    num_shared = fields.integer(f"{arch}.expert_shared_count", 0, 1 << 8, default=0)
    experts = structs.replace(
        experts,
        routing=routing(experts.num_active),
        dense_layers=tuple(n for n in range(num_layers) if n < first or (n + 1) % step),
        shared_size=num_shared * experts.intermediate_size,
    )
    return {"form": FORM, "experts": experts}


FAMILIES: Final[dict[str, GGUFFamily]] = {
    "ernie4_5": GGUFFamily("ernie4_5", _ernie4_5),
    "ernie4_5-moe": GGUFFamily("ernie4_5_moe", _ernie4_5_moe, has_experts=True),
}
