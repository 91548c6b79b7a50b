"""Ministral 3 (Mistral AI 2025): Llama's layers; queries grow with their position, to keep long contexts sharp.

The growth is in the `ModelSpec`, with the scaling of rotary.
"""

from __future__ import annotations

from .llama import build

__all__ = ["build"]
