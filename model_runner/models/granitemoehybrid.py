"""Granite 4 without experts and state layers (IBM 2025): Granite 3's layers under other names."""

from __future__ import annotations

from .granite import build

__all__ = ["build"]
