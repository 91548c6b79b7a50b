"""EXAONE 4."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ..fields import Fields
from ..spec.layer_form import POST_NORMS_OVER_HEADS, WindowsSpec
from .family import GGUF, Facts, Family
from .gguf_readers import windowed_layers
from .hf_readers import rope_facts, windows_by_types
from .hf_rope import MAX_POSITIONS, read_rope
from .olmo import NAMES

FORM: Final = structs.replace(POST_NORMS_OVER_HEADS, qk_norm_over_heads=False)


def _exaone4(fields: Fields) -> Facts:
    """Where some layers have a window, only those rotate."""
    facts = rope_facts(fields, read_rope(fields)) | {"form": FORM}
    if fields.get("sliding_window") is None and "sliding_window" in fields:
        return facts
    windowed = windows_by_types(fields, 4, "sliding_window_pattern")
    size = fields.integer("sliding_window", 1, MAX_POSITIONS, default=4096)
    return facts | {
        "windows": WindowsSpec(size=size, layers=windowed),
        "rope_layers": windowed,
    }


_PATTERN: Final = 4  # every fourth layer has no window


def _exaone4_gguf(fields: Fields, arch: str) -> Facts:
    """Where some layers have a window, only those rotate."""
    facts: Facts = {"form": FORM}
    window = fields.integer(f"{arch}.attention.sliding_window", 0, 1 << 30, default=0)
    if not window:
        return facts
    windowed = windowed_layers(fields, arch, _PATTERN)
    return facts | {"windows": WindowsSpec(size=window, layers=windowed), "rope_layers": windowed}


FAMILIES: Final = (
    Family(
        "exaone4",
        structure="post_norm",
        published="EXAONE 4.0",
        architecture="Exaone4ForCausalLM",
        read=_exaone4,
        gguf={"exaone4": GGUF(_exaone4_gguf, NAMES)},
    ),
)
