"""Tiny towers are computed in several shares, and small images of any size take several blocks of rows."""

from __future__ import annotations

import pytest

from engine.models.spec import vision_spec


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 patches a part."""
    monkeypatch.setattr(vision_spec, "PART_PATCHES", 16)
