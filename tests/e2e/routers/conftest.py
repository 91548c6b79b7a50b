"""Two engines that the tests share, and a router of each kind in front of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ..serving import SLOW, EngineServe
from .routing import ALL, Router, why_not

WORKER = ("--dtype", "float32", "--served-model-name", "tiny", *SLOW)


def start_workers(stack: ExitStack, model: Path, count: int) -> list[EngineServe]:
    """Engines that start at the same time."""
    engines = [stack.enter_context(EngineServe(str(model), *WORKER)) for _ in range(count)]
    return [engine.wait_until_ready() for engine in engines]


def router_names() -> list[str]:
    """The routers that are installed; skips the test if there is none."""
    names = [name for name in ALL if not why_not(name)]
    if not names:
        pytest.skip(why_not(ALL[0]))
    return names


@pytest.fixture(scope="session")
def workers(model: Path) -> Iterator[list[EngineServe]]:
    """Two engines; each test leaves them idle."""
    router_names()
    with ExitStack() as stack:
        engines = start_workers(stack, model, 2)
        yield engines
        for engine in engines:
            assert engine.stop() == 0, engine.log
            assert "Traceback" not in engine.log


@pytest.fixture(scope="session", params=ALL)
def router(request: pytest.FixtureRequest, workers: list[EngineServe]) -> Iterator[Router]:
    """A router in front of them."""
    if reason := why_not(request.param):
        pytest.skip(reason)
    more = ("--log-level", "debug") if request.param == "vllm-router" else ()
    with Router(request.param, *(each.url for each in workers), more=more) as router:
        yield router.wait_until_ready()
