"""Granite 4 without state layers (IBM 2025): Granite 3's layers under other names, with or without experts."""

from __future__ import annotations

from .granite import build

__all__ = ["build"]
