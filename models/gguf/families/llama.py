"""Llama, and models whose files say that they are: Mistral (their files mention no window), Mixtral, SmolLM2."""

from __future__ import annotations

from typing import Final

from .family import GGUFFamily
from .mixtral import llama_or_mixtral

FAMILIES: Final[dict[str, GGUFFamily]] = {
    "llama": GGUFFamily("llama", llama_or_mixtral, has_experts=True, neighbors=True, also=("mixtral",))
}
