"""LFM2 and LFM2-MoE."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ...fields import Fields
from ...hf.families.lfm import LFM2_FORM
from ...spec.experts_spec import LFM2_NAMES
from ...spec.state_spec import StateSpec
from .family import Facts, GGUFFamily
from .mamba import kv_heads
from .mixtral import mixture_of

_SIGMOID: Final = 2
"""llama.cpp's number of this function of a router."""


def _lfm2(fields: Fields, arch: str) -> Facts:
    """A layer without heads of keys and values has a short convolution."""
    heads = kv_heads(fields, arch)
    state = StateSpec(
        layers=tuple(count == 0 for count in heads),
        conv_size=fields.integer(f"{arch}.embedding_length", 1, 1 << 20),
        conv_taps=fields.integer(f"{arch}.shortconv.l_cache", 2, 64),
    )
    return {
        "num_kv_heads": max(heads),
        "qk_norm": True,
        "form": LFM2_FORM,
        "state": state if any(state.layers) else None,
    }


def _lfm2_moe(fields: Fields, arch: str) -> Facts:
    key = f"{arch}.expert_gating_func"
    if fields.integer(key, 0, 1 << 8, default=_SIGMOID) != _SIGMOID:
        raise fields.error(key, fields.get(key), f"only {_SIGMOID}, a sigmoid, is supported")
    experts = mixture_of(fields, arch, LFM2_NAMES)
    num_dense = fields.integer(f"{arch}.leading_dense_block_count", 0, 1 << 12, default=0)
    experts = structs.replace(
        experts,
        dense_layers=tuple(range(num_dense)),
        routing=structs.replace(experts.routing, scores="sigmoid", has_bias=True),
    )
    return _lfm2(fields, arch) | {"experts": experts}


_NAMES: Final = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}

FAMILIES: Final[dict[str, GGUFFamily]] = {
    "lfm2": GGUFFamily("lfm2", _lfm2, _NAMES),
    "lfm2moe": GGUFFamily("lfm2_moe", _lfm2_moe, _NAMES, has_experts=True),
}
