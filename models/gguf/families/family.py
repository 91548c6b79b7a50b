"""`GGUFFamily`: how to read one GGUF architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from ..gguf_file import GGUFFile

from ...fields import Fields
from ...hf.families.family import windows_by_pattern

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


RMS_NORM_EPS: Final = "attention.layer_norm_rms_epsilon"
LAYER_NORM_EPS: Final = "attention.layer_norm_epsilon"


class GGUFFamily(NamedTuple):
    """How to read one architecture.

    Attributes:
        model_type: Hugging Face's.
        facts: reads the fields that are not common to all; called with the architecture's name, the prefix of its keys.
        names: modules of a layer, and their names in a file.
        partial_rotary: only a part of each head may rotate.
        has_experts: the keys of experts are read.
        has_own_heads: `facts` reads the shape of heads, too.
        neighbors: the rows of q and k are ordered so that rotary pairs are adjacent; Hugging Face pairs the halves.
        offset_norms: 1 was added to the weights of norms, except to those within a layer with a state.
        tiled_values: the value heads of delta nets are ordered so that the first ones of all key heads come first;
            Hugging Face has those of each key head together.
        norm_eps: the key of the norms' eps.
        of_tensors: adds the facts that only the tensors show.
        also: further values of `model_type` that the facts may have.
    """

    model_type: str
    facts: Callable[[Fields, str], Facts]
    names: Mapping[str, str] = LAYER_NAMES
    partial_rotary: bool = False
    has_experts: bool = False
    has_own_heads: bool = False
    neighbors: bool = False
    offset_norms: bool = False
    tiled_values: bool = False
    norm_eps: str = RMS_NORM_EPS
    of_tensors: Callable[[GGUFFile, Facts], Facts] | None = None
    also: tuple[str, ...] = ()


def windowed_layers(fields: Fields, arch: str, default: int) -> tuple[bool, ...]:
    """Which layers have a window: one truth for each in the file, or all except every nth (default: `default`)."""
    num_layers = fields.integer(f"{arch}.block_count", 1, 1 << 12)
    key = f"{arch}.attention.sliding_window_pattern"
    value = fields.get(key)
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list):
        return windows_by_pattern(fields.integer(key, 1, 1 << 12, default=default), num_layers)
    if len(value) < num_layers or any(one not in (0, 1) for one in value):
        raise fields.error(key, value, f"expected a truth value for each of {num_layers} layers")
    return tuple(bool(one) for one in value[:num_layers])


def no_facts(fields: Fields, arch: str) -> Facts:
    """For an architecture with the common fields only."""
    return {}
