"""`make_scheduler`: a scheduler with a content-checking FakeRunner; see `harness.py`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .harness import Harness


@pytest.fixture
def make_scheduler() -> Callable[..., Harness]:
    """Make a `Harness`; arguments as there."""
    return Harness
