"""`GGUFFamily`: how to read one GGUF architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from ...fields import Fields

Facts = dict[str, Any]
"""The fields of `ModelSpec` that an architecture adds or changes."""

LAYER_NAMES: Final[Mapping[str, str]] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Modules of a layer of Llama, and their names in a file."""

QK_NORM_NAMES: Final[Mapping[str, str]] = {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


class GGUFFamily(NamedTuple):
    """How to read one architecture.

    Attributes:
        model_type: Hugging Face's.
        facts: reads the fields that are not common to all; called with the architecture's name, the prefix of its keys.
        names: modules of a layer, and their names in a file.
        partial_rotary: only a part of each head may rotate.
        has_experts: the keys of experts are read.
        has_own_heads: `facts` reads the shape of heads, too.
    """

    model_type: str
    facts: Callable[[Fields, str], Facts]
    names: Mapping[str, str] = LAYER_NAMES
    partial_rotary: bool = False
    has_experts: bool = False
    has_own_heads: bool = False


def no_facts(fields: Fields, arch: str) -> Facts:
    """For an architecture with the common fields only."""
    return {}
