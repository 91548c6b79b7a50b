"""DistilBERT (Sanh et al. 2019): BERT with half the layers, other tensor names, and no token types."""

from __future__ import annotations

from .bert import build

__all__ = ["build"]
