"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's layers with biases on q, k and v.

The layers take the biases, and the attention backends the windows, from the `ModelSpec`.
"""

from __future__ import annotations

from .llama import build

__all__ = ["build"]
