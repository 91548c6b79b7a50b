"""Ministral 8B (Mistral AI 2024): Llama's layers, some or all of them with a sliding window."""

from __future__ import annotations

from .llama import build

__all__ = ["build"]
