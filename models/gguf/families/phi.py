"""Phi-3 and Phi-3.5-MoE."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ...fields import Fields
from ...hf.families.phi import PHIMOE_JITTER, phimoe_routing
from ...spec.experts_spec import MIXTRAL_NAMES
from ...spec.layer_form import FUSED, LayerForm
from .family import LAYER_NAMES, Facts, GGUFFamily
from .mixtral import mixture_of


def _phi3(fields: Fields, arch: str) -> Facts:
    return {**_windows(fields, arch), "form": FUSED}


def _phimoe(fields: Fields, arch: str) -> Facts:
    """Files have no `router_jitter_noise`; whether the head has a bias is seen from its tensor."""
    routing = phimoe_routing(PHIMOE_JITTER)
    experts = structs.replace(mixture_of(fields, arch, MIXTRAL_NAMES), routing=routing)
    form = LayerForm(norm="layer", norm_bias=True, head_bias=True)
    return {**_windows(fields, arch), "form": form, "experts": experts}


def _windows(fields: Fields, arch: str) -> Facts:
    window = fields.integer(f"{arch}.attention.sliding_window", 0, 1 << 30, default=0)
    num_layers = fields.integer(f"{arch}.block_count", 1, 1 << 12)
    return {"sliding_window": window, "windowed_layers": (True,) * num_layers} if window else {}


_NAMES: Final = {
    **{module: stored for module, stored in LAYER_NAMES.items() if stored != "ffn_up"},
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}

FAMILIES: Final[dict[str, GGUFFamily]] = {
    "phi3": GGUFFamily("phi3", _phi3, _NAMES, partial_rotary=True),
    "phimoe": GGUFFamily("phimoe", _phimoe, has_experts=True),
}
