"""Two engines that are connected."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.model_runner.distributed import transfer_worker

from .sides import MakeSides, connected_sides


@pytest.fixture
def make_sides(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeSides]:
    """See `connected_sides`."""
    monkeypatch.setattr(transfer_worker, "_IDLE_POLL_MS", 10)  # how long the end of a worker takes
    with connected_sides() as make:
        yield make
