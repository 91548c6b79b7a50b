"""A small model, and servers that are killed in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.serving import EngineServe

StartServe = Callable[..., EngineServe]


@pytest.fixture(scope="session")
def model(small_llama: Path) -> Path:
    """As in the end-to-end tests."""
    return small_llama


@pytest.fixture
def start_serve(model: Path) -> Iterator[StartServe]:
    """Starts servers of a test's own, and kills what is left of them."""
    started: list[EngineServe] = []

    def start(*arguments: str, model: Path = model) -> EngineServe:
        started.append(EngineServe(str(model), "--dtype", "float32", *arguments))
        return started[-1].wait_until_ready()

    yield start
    for engine in started:
        engine.__exit__()
