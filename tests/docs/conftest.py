"""The generator of the reference pages as a module: `docs` is no part of the package `engine`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def import_reference(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], ModuleType]:
    """A module of `docs/reference` by its name; nothing else of the repository's root is importable."""

    def load(name: str) -> ModuleType:
        folder = tmp_path_factory.mktemp("path")
        (folder / "docs").symlink_to(DOCS, target_is_directory=True)
        monkeypatch.syspath_prepend(folder)
        return importlib.import_module(f"docs.reference.{name}")

    return load
