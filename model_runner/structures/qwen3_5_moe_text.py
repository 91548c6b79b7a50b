"""Qwen3.5 with a mixture of experts in every layer; a shared one with a gate computes for all tokens."""

from __future__ import annotations

from .qwen3_next import build

__all__ = ["build"]
