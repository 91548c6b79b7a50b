"""Llama 4 (Meta 2025): Llama's layers, of which most rotate and attend in chunks, with experts and a shared expert."""

from __future__ import annotations

from .llama import build

__all__ = ["build"]
