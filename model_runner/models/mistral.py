"""Mistral (Jiang et al. 2023): Llama's layers; the first releases let every layer see a sliding window only.

The window is in the `ModelSpec`, where the attention backends find it.
"""

from __future__ import annotations

from .llama import build

__all__ = ["build"]
