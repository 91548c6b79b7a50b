"""gpt-oss (OpenAI 2025): Llama's layers with sinks, windows in every other one, and experts with a clamped SwiGLU."""

from __future__ import annotations

from .llama import build

__all__ = ["build"]
