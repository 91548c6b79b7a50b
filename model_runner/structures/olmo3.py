"""OLMo 3 (Olmo Team 2025): OLMo 2's layers; three of four have a sliding window, and only the others scaled rotary.

The attention backends take the windows, and the rotary tables the scaling, from the `ModelSpec`.
"""

from __future__ import annotations

from .olmo2 import build

__all__ = ["build"]
