"""`NewTokenRatio` lives in `estimator/ratio.py`, among the other rules about future output."""

from __future__ import annotations

from .estimator.ratio import NewTokenRatio

__all__ = ["NewTokenRatio"]
