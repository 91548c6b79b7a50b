"""Phi-3."""

from __future__ import annotations

from typing import Final

from ...fields import Fields
from ..hf_rope import read_rope
from .family import Facts, Family, rope_facts, window_everywhere


def _phi3(fields: Fields) -> Facts:
    rope = read_rope(fields, kinds=("default", "longrope"), outer_original=True)
    num_heads = fields.integer("num_attention_heads", 1, 1 << 12)
    default = fields.integer("hidden_size", 1, 1 << 20) // num_heads
    rotary_dim = int(fields.integer("head_dim", 1, 1 << 12, default) * rope.partial_factor)
    if rotary_dim == 0:
        raise fields.error("partial_rotary_factor", rope.partial_factor, "a part of each head must rotate")
    return (
        rope_facts(fields, rope._replace(partial_factor=1.0))
        | window_everywhere(fields)
        | {"rotary_dim": None if rope.partial_factor == 1.0 else rotary_dim}
    )


FAMILIES: Final[dict[str, Family]] = {
    "phi3": Family("Phi3ForCausalLM", _phi3),
}
