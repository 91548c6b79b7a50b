"""Mixtral (Jiang et al. 2024): Mistral with a mixture of experts in place of every MLP."""

from __future__ import annotations

from .llama import build

__all__ = ["build"]
