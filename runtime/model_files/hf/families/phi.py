"""Phi-3."""

from __future__ import annotations

from typing import Final

from ...fields import Fields
from ...layer_form import FUSED
from ..hf_rope import read_rope
from .family import Facts, Family, partial_rope_facts, window_everywhere


def _phi3(fields: Fields) -> Facts:
    rope = read_rope(fields, kinds=("default", "longrope"), outer_original=True)
    return partial_rope_facts(fields, rope) | window_everywhere(fields) | {"form": FUSED}


FAMILIES: Final[dict[str, Family]] = {
    "phi3": Family("Phi3ForCausalLM", _phi3),
}
