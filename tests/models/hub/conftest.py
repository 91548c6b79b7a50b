"""A hub on loopback, used by this process, with caches of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_hub import FakeHub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub() as fake:
        fake.serve_this_process(tmp_path / "hf", tmp_path / "cache", monkeypatch)
        yield fake


@pytest.fixture
def hub_folder(tmp_path: Path) -> Path:
    """The folder of all models of `hub`."""
    return tmp_path / "hf" / "hub"
