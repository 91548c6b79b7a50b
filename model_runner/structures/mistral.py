"""Mistral (Jiang et al. 2023): Llama's layers; in the first releases every layer has a sliding window.

The attention backends take the window from the `ModelSpec`.
"""

from __future__ import annotations

from .llama import build

__all__ = ["build"]
