"""Tiny towers are computed in several shares, and small images of any size take several blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.models.spec import vision_spec


@pytest.fixture(autouse=True, scope="package")
def small_parts() -> Iterator[None]:
    """16 patches a part."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vision_spec, "PART_PATCHES", 16)
        yield
