"""SmolLM3 (Hugging Face 2025): Llama's layers; every fourth layer does not rotate queries and keys by position.

Which ones is in the `ModelSpec`.
"""

from __future__ import annotations

from .llama import build

__all__ = ["build"]
