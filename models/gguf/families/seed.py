"""Seed-OSS."""

from __future__ import annotations

from typing import Final

from .family import LAYER_NAMES, GGUFFamily, no_facts

_NAMES: Final = {**LAYER_NAMES, "post_attention_layernorm": "post_attention_norm"}

FAMILIES: Final[dict[str, GGUFFamily]] = {"seed_oss": GGUFFamily("seed_oss", no_facts, _NAMES)}
