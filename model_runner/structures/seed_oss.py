"""Seed-OSS (ByteDance Seed 2025): Llama's layers with biases on q, k and v."""

from __future__ import annotations

from .llama import build

__all__ = ["build"]
