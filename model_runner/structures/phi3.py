"""Phi-3 and Phi-4-mini (Abdin et al. 2024): Llama's layers; q, k, v are one matrix, gate and up another.

Long-context releases scale each rotary frequency separately (longrope), Phi-4-mini rotates only a part of each head,
and short-context releases have a sliding window. All of this is in the `ModelSpec`.
"""

from __future__ import annotations

from .llama import build

__all__ = ["build"]
