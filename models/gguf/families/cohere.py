"""Command R and Aya (`command-r`), Command R7B, Command A and Tiny Aya (`cohere2`)."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ...fields import Fields
from ...spec.layer_form import PARALLEL
from .family import LAYER_NAMES, LAYER_NORM_EPS, Facts, GGUFFamily, windowed_layers

_PATTERN: Final = 4  # every fourth layer has no window


def _command_r(fields: Fields, arch: str) -> Facts:
    scale = fields.number(f"{arch}.logit_scale", 1e-6, 1e6)
    return {"form": structs.replace(PARALLEL, logits_scale=scale)}


def _cohere2(fields: Fields, arch: str) -> Facts:
    """Layers with a window rotate, the others do not."""
    windowed = windowed_layers(fields, arch, _PATTERN)
    return _command_r(fields, arch) | {
        "sliding_window": fields.integer(f"{arch}.attention.sliding_window", 1, 1 << 30),
        "windowed_layers": windowed,
        "rope_layers": windowed,
    }


_NAMES: Final = {module: stored for module, stored in LAYER_NAMES.items() if stored != "ffn_norm"}

FAMILIES: Final[dict[str, GGUFFamily]] = {
    "command-r": GGUFFamily("cohere", _command_r, _NAMES, norm_eps=LAYER_NORM_EPS),
    "cohere2": GGUFFamily("cohere2", _cohere2, _NAMES, norm_eps=LAYER_NORM_EPS),
}
