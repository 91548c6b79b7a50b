"""`GGUF_FAMILIES`: the reader of each GGUF architecture, and the names of tensors by Hugging Face's `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from . import deepseek, gemma, llama, phi, qwen
from .family import LAYER_NAMES, GGUFFamily

GGUF_FAMILIES: Final[dict[str, GGUFFamily]] = {
    **llama.FAMILIES,
    **qwen.FAMILIES,
    **gemma.FAMILIES,
    **phi.FAMILIES,
    **deepseek.FAMILIES,
}

_NAMES: Final = {family.model_type: family.names for family in GGUF_FAMILIES.values()}


def layer_names(model_type: str) -> Mapping[str, str]:
    """Modules of a layer of this `model_type`, and their names in a file; Llama's if there is no such file."""
    return _NAMES.get(model_type, LAYER_NAMES)
