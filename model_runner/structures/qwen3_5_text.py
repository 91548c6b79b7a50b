"""Qwen3.5 (Qwen Team 2026): Qwen3-Next without experts; the projections of its delta nets are matrices of their own."""

from __future__ import annotations

from .qwen3_next import build

__all__ = ["build"]
