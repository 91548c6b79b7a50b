"""Ministral 3. The Ministral of 2024 is stored as `llama`."""

from __future__ import annotations

from typing import Final

from ...fields import Fields
from ...spec.attention_form import TemperatureTuning
from .family import Facts, GGUFFamily


def _mistral3(fields: Fields, arch: str) -> Facts:
    key = f"{arch}.attention.scale"
    if fields.number(key, 0.0, 1e9, default=0.0):
        raise fields.error(key, fields.get(key), "another scale of the scores is not supported")
    scale = fields.number(f"{arch}.attention.temperature_scale", 0.0, 1e3, default=0.0)
    if not scale or fields.get(f"{arch}.rope.scaling.type") != "yarn":
        return {}
    length = fields.integer(f"{arch}.rope.scaling.original_context_length", 2, 1 << 30)
    return {"temperature": TemperatureTuning(scale=scale, length=length)}


FAMILIES: Final[dict[str, GGUFFamily]] = {
    "mistral3": GGUFFamily("ministral3", _mistral3, neighbors=True),
}
