"""LFM2-MoE (Liquid AI 2025): LFM2 with a mixture of experts after the first dense layers."""

from .lfm2 import build

__all__ = ["build"]
