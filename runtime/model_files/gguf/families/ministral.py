"""Ministral 3. The Ministral of 2024 is stored as `llama`."""

from __future__ import annotations

from typing import Final

from ...fields import Fields
from .family import Facts, GGUFFamily


def _mistral3(fields: Fields, arch: str) -> Facts:
    """`query_beta`: read with the scaling of rotary, see `gguf_rope`."""
    key = f"{arch}.attention.scale"
    if fields.number(key, 0.0, 1e9, default=0.0):
        raise fields.error(key, fields.get(key), "another scale of the scores is not supported")
    return {}


FAMILIES: Final[dict[str, GGUFFamily]] = {
    "mistral3": GGUFFamily("ministral3", _mistral3, neighbors=True),
}
