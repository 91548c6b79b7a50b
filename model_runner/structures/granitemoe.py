"""Granite 3 with experts (IBM 2024): Granite 3 with a mixture of experts in place of every MLP."""

from __future__ import annotations

from .granite import build

__all__ = ["build"]
