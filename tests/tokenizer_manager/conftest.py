"""A served fake engine as a fixture, and an HTTP client for it."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import pytest

from engine.tokenizer_manager.http.services import Services

from .fake_engine import WAIT_S, FakeEngine, Script, ServerThread, make_services, say_all

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # reading the system's certificates takes longer than a test


class Served(NamedTuple):
    """A server under test."""

    engine: FakeEngine
    services: Services
    url: str
    client: httpx.Client
    threads: ThreadPoolExecutor

    def post_later(self, path: str, **options: Any) -> Future[httpx.Response]:
        """Send a request whose answer the test scripts step by step."""
        return self.threads.submit(self.client.post, path, **options)


Serve = Callable[..., Served]


@pytest.fixture(scope="session")
def stopped_servers() -> Iterator[list[ServerThread]]:
    """Servers that were told to stop; waiting for each at the end of its test would take most of the tests' time."""
    servers: list[ServerThread] = []
    yield servers
    for server in servers:
        server.join()


@pytest.fixture
def serve(stopped_servers: list[ServerThread]) -> Iterator[Serve]:
    """Starts a server: `serve(script, **settings)`; all are stopped at the end of the test."""
    with contextlib.ExitStack() as stack:

        def start(script: Script | None = None, **settings: Any) -> Served:
            return stack.enter_context(_served(stopped_servers, script, settings))

        yield start


@pytest.fixture(scope="module")
def answering(stopped_servers: list[ServerThread]) -> Iterator[Served]:
    """A server that answers every request with "x", shared by the tests of a module."""
    with _served(stopped_servers, say_all("x"), {}) as served:
        yield served


@contextlib.contextmanager
def _served(servers: list[ServerThread], script: Script | None, settings: dict[str, Any]) -> Iterator[Served]:
    engine = FakeEngine(script)
    services = make_services(engine, **settings)
    server = ServerThread(services, engine)
    servers.append(server)
    try:
        with (
            httpx.Client(base_url=server.url, timeout=WAIT_S, verify=NO_TLS) as client,
            ThreadPoolExecutor(4) as threads,
        ):
            yield Served(engine, services, server.url, client, threads)
    finally:
        server.stop()
