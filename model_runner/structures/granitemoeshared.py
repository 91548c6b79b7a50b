"""Granite 3 with experts and a shared one, which computes for every token (IBM 2025)."""

from __future__ import annotations

from .granite import build

__all__ = ["build"]
