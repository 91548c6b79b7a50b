"""ERNIE 4.5 without experts (Baidu 2025): Llama's layers, in which neighboring elements of a head rotate."""

from __future__ import annotations

from .llama import build

__all__ = ["build"]
