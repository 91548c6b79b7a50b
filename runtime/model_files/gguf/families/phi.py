"""Phi-3."""

from __future__ import annotations

from typing import Final

from ...fields import Fields
from ...layer_form import FUSED
from .family import LAYER_NAMES, Facts, GGUFFamily


def _phi3(fields: Fields, arch: str) -> Facts:
    window = fields.integer("phi3.attention.sliding_window", 0, 1 << 30, default=0)
    num_layers = fields.integer("phi3.block_count", 1, 1 << 12)
    windows = {"sliding_window": window, "windowed_layers": (True,) * num_layers} if window else {}
    return {**windows, "form": FUSED}


_NAMES: Final = {
    **{module: stored for module, stored in LAYER_NAMES.items() if stored != "ffn_up"},
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}

FAMILIES: Final[dict[str, GGUFFamily]] = {"phi3": GGUFFamily("phi3", _phi3, _NAMES, partial_rotary=True)}
