"""OLMoE (Muennighoff et al. 2024): Llama with a mixture of experts, and norms of q and k over all heads."""

from __future__ import annotations

from .llama import build

__all__ = ["build"]
