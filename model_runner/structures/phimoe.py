"""Phi-3.5-MoE (Abdin et al. 2024): Llama with layer norms, and a mixture of experts with SparseMixer's routing."""

from __future__ import annotations

from .llama import build

__all__ = ["build"]
