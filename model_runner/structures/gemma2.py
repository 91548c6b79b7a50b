"""Gemma 2 (Gemma Team 2024): Gemma 3's layers without norms of heads, one rotary base, capped scores and logits."""

from __future__ import annotations

from .gemma3_text import build

__all__ = ["build"]
