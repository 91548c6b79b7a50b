"""SmolLM3."""

from __future__ import annotations

from typing import Final

from ...fields import Fields
from .family import Facts, GGUFFamily

_INTERVAL: Final = 4  # every fourth layer has no rotary; files do not say


def _smollm3(fields: Fields, arch: str) -> Facts:
    num_layers = fields.integer(f"{arch}.block_count", 1, 1 << 12)
    return {"rope_layers": tuple((layer + 1) % _INTERVAL != 0 for layer in range(num_layers))}


FAMILIES: Final[dict[str, GGUFFamily]] = {"smollm3": GGUFFamily("smollm3", _smollm3, neighbors=True)}
