"""DeepSeek-V3 (DeepSeek-AI 2024): computed as DeepSeek-V2; what differs is in the `ModelSpec`."""

from __future__ import annotations

from .deepseek_v2 import build

__all__ = ["build"]
