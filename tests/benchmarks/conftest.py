"""Benchmarks as modules of their own, and their `main` as a person calls it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def import_benchmark(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], ModuleType]:
    """By the name of its file; nothing else of the repository's root is importable."""

    def load(name: str) -> ModuleType:
        folder = tmp_path_factory.mktemp("path")
        (folder / "benchmarks").symlink_to(BENCHMARKS, target_is_directory=True)
        monkeypatch.syspath_prepend(folder)
        return importlib.import_module(f"benchmarks.{name}")

    return load


def run_benchmark(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    """With such arguments, and torch's number of threads as before behind it."""
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, arguments)])
    threads = torch.get_num_threads()
    try:
        module.main()
    finally:
        torch.set_num_threads(threads)
