"""EXAONE 4."""

from __future__ import annotations

from typing import Final

from ...fields import Fields
from ...hf.families.exaone import FORM
from .family import Facts, GGUFFamily, windowed_layers
from .olmo import NAMES

_PATTERN: Final = 4  # every fourth layer has no window


def _exaone4(fields: Fields, arch: str) -> Facts:
    """Where some layers have a window, only those rotate."""
    facts: Facts = {"qk_norm": True, "form": FORM}
    window = fields.integer(f"{arch}.attention.sliding_window", 0, 1 << 30, default=0)
    if not window:
        return facts
    windowed = windowed_layers(fields, arch, _PATTERN)
    return facts | {"sliding_window": window, "windowed_layers": windowed, "rope_layers": windowed}


FAMILIES: Final[dict[str, GGUFFamily]] = {"exaone4": GGUFFamily("exaone4", _exaone4, NAMES)}
