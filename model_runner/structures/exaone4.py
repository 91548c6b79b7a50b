"""EXAONE 4 (LG AI Research 2025): OLMo 2's layers with a norm for each head of q and of k.

In the larger one three of four layers have a sliding window, and only these rotate; both are in the `ModelSpec`.
"""

from __future__ import annotations

from .olmo2 import build

__all__ = ["build"]
