"""GLM-4 of 2024 (Zeng et al. 2024): Llama's layers; neighboring elements of half of each head rotate.

Gate and up are one matrix.
"""

from __future__ import annotations

from .llama import build

__all__ = ["build"]
