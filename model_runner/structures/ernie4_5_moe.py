"""ERNIE 4.5 with experts (Baidu 2025): ERNIE's layers with a mixture of experts after the first ones."""

from __future__ import annotations

from .glm4_moe import build

__all__ = ["build"]
