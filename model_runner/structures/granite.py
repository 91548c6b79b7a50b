"""Granite 3 (IBM 2024): Llama's layers with factors of the embeddings, scores, blocks' outputs and logits.

The factor of scores is in the `ModelSpec`, the others in its `LayerForm`.
"""

from __future__ import annotations

from .llama import build

__all__ = ["build"]
