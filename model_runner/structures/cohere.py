"""Command R (Cohere 2024) and Aya 23: Cohere 2's layers; all of them rotate, none has a window."""

from __future__ import annotations

from .cohere2 import build

__all__ = ["build"]
