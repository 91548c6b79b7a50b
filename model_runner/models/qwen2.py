"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's layers with biases on q, k and v.

Biases and windows are in the `ModelSpec`, where the layers and the attention backends find them.
"""

from __future__ import annotations

from .llama import build

__all__ = ["build"]
