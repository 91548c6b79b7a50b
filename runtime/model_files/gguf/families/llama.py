"""Llama, and models whose files say that they are: Mistral (their files mention no window), SmolLM2."""

from __future__ import annotations

from typing import Final

from .family import GGUFFamily, no_facts

FAMILIES: Final[dict[str, GGUFFamily]] = {"llama": GGUFFamily("llama", no_facts, neighbors=True)}
