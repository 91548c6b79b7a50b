"""EXAONE 4."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ...fields import Fields
from ...spec.layer_form import POST_NORMS_OVER_HEADS
from ..hf_rope import MAX_POSITIONS, read_rope
from .family import Facts, Family, rope_facts, windows_by_types

FORM: Final = structs.replace(POST_NORMS_OVER_HEADS, qk_norm_over_heads=False)


def _exaone4(fields: Fields) -> Facts:
    """Where some layers have a window, only those rotate."""
    facts = rope_facts(fields, read_rope(fields)) | {"qk_norm": True, "form": FORM}
    if fields.get("sliding_window") is None:
        return facts
    windowed = windows_by_types(fields, 4, "sliding_window_pattern")
    return facts | {
        "sliding_window": fields.integer("sliding_window", 1, MAX_POSITIONS),
        "windowed_layers": windowed,
        "rope_layers": windowed,
    }


FAMILIES: Final[dict[str, Family]] = {"exaone4": Family("Exaone4ForCausalLM", _exaone4)}
