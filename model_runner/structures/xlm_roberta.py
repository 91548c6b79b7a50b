"""XLM-RoBERTa (Conneau et al. 2019): RoBERTa with another vocabulary."""

from __future__ import annotations

from .bert import build

__all__ = ["build"]
