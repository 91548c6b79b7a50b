"""RoBERTa (Liu et al. 2019): BERT with positions that begin after the padding token's id."""

from __future__ import annotations

from .bert import build

__all__ = ["build"]
