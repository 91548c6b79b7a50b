"""GLM-4.7-Flash (Zhipu AI 2026): computed as DeepSeek-V2; what differs is in the `ModelSpec`."""

from __future__ import annotations

from .deepseek_v2 import build

__all__ = ["build"]
