"""The text of Gemma 4 without towers: Gemma 4's layers without inputs of their own."""

from __future__ import annotations

from .gemma4_text import build

__all__ = ["build"]
