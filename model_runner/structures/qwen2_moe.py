"""Qwen2-MoE (Yang et al. 2024): Qwen2 with a mixture of experts; a shared one with a gate computes for all tokens."""

from __future__ import annotations

from .llama import build

__all__ = ["build"]
