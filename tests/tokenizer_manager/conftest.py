"""A served fake engine as a fixture, and an HTTP client for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from engine.tokenizer_manager.http.services import Services

from .fake_engine import WAIT_S, FakeEngine, Script, make_services, serving


class Served(NamedTuple):
    """A server under test."""

    engine: FakeEngine
    services: Services
    url: str
    client: httpx.Client


Serve = Callable[..., Served]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server: `serve(script, **settings)`; all are stopped at the end of the test."""
    with contextlib.ExitStack() as stack:

        def start(script: Script | None = None, **settings: Any) -> Served:
            engine = FakeEngine(script)
            services = make_services(engine, **settings)
            url = stack.enter_context(serving(services, engine))
            client = stack.enter_context(httpx.Client(base_url=url, timeout=WAIT_S))
            return Served(engine, services, url, client)

        yield start
