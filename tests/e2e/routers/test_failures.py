"""Workers that are killed or drained behind real routers, and the end of smg.

The first engine lives through all of it; the second one is each test's own, with routers of all kinds in front of both.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import httpx
import pytest

from ..serving import DEADLINE_S, EngineServe
from .conftest import WORKER, router_names, start_workers
from .routing import SMG, Router, kill, why_not

pytestmark = [pytest.mark.real_process, pytest.mark.slow]

SHORT = {"model": "tiny", "max_tokens": 4, "temperature": 0}
STREAM = {"model": "tiny", "prompt": "on and on", "max_tokens": 400, "min_tokens": 400, "stream": True}


@pytest.fixture
def doomed(workers: list[EngineServe], model: Path) -> Iterator[EngineServe]:
    """A worker for a test to end."""
    with ExitStack() as stack:
        yield start_workers(stack, model, 1)[0]


@pytest.fixture
def routers(workers: list[EngineServe], doomed: EngineServe) -> Iterator[list[Router]]:
    """A router of each kind, which sends requests to the shared worker and to the doomed one in turn."""
    with ExitStack() as stack:
        named = [
            stack.enter_context(Router(name, workers[0].url, doomed.url, policy="round_robin"))
            for name in router_names()
        ]
        yield [router.wait_until_ready() for router in named]


def statuses(router: Router, count: int, **fields: int) -> list[int]:
    """Of requests one after the other."""
    with router.client() as client:
        bodies = ({"prompt": f"number {i}", **SHORT, **fields} for i in range(count))
        return [client.post("/v1/completions", json=body).status_code for body in bodies]


class OpenStreams:
    """Two streams through each router, one on each worker; the first event of each has come. A context manager."""

    def __init__(self, routers: list[Router]) -> None:
        self._exit = ExitStack()
        self._streams: list[tuple[Router, Iterator[str]]] = []
        for router in routers:
            client = self._exit.enter_context(router.client())
            for _ in range(2):
                response = self._exit.enter_context(client.stream("POST", "/v1/completions", json=STREAM))
                lines = response.iter_lines()
                assert next(lines).startswith("data: "), router.log
                self._streams.append((router, lines))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._exit.close()

    def whole(self) -> dict[str, list[bool]]:
        """By router, for each stream: it ended as it should, or the client could see that it did not."""
        result: dict[str, list[bool]] = {}
        for router, lines in self._streams:
            try:
                rest = [line for line in lines if line]
            except httpx.RemoteProtocolError:
                whole = False
            else:
                whole = rest[-1] == "data: [DONE]" and '"error"' not in rest[-2]
            result.setdefault(router.name, []).append(whole)
        return result


def test_a_killed_worker_breaks_its_streams_and_nothing_else_and_is_used_when_it_is_back(
    routers: list[Router], doomed: EngineServe, model: Path
):
    with OpenStreams(routers) as streams, ThreadPoolExecutor(2 * len(routers)) as threads:
        answers = [
            threads.submit(statuses, router, 1, max_tokens=200, min_tokens=200)
            for router in routers
            for _ in range(2)
        ]
        doomed.wait_for_requests(2 * len(routers))
        kill(doomed)
        ended = streams.whole()
        assert {name: sorted(each) for name, each in ended.items()} == {
            router.name: [False, True] for router in routers
        }
        assert [answer.result() for answer in answers] == [[200]] * len(answers), (
            "repeated on the other worker"
        )

    for router in routers:
        assert statuses(router, 8) == [200] * 8, router.log
    for router in routers:
        router.wait_until_ready(num_workers=1)
        assert statuses(router, 4) == [200] * 4, router.log

    port = doomed.url.rpartition(":")[2]
    with EngineServe(str(model), *WORKER, "--port", port) as again:
        again.wait_until_ready()
        for router in routers:
            router.wait_until_ready()
            assert statuses(router, 4) == [200] * 4, router.log
        assert again.idle_metrics()["e2e_request_latency_seconds_count"] == 2 * len(routers)


def test_a_drained_worker_ends_its_streams_and_gets_no_more_requests(
    routers: list[Router], doomed: EngineServe, workers: list[EngineServe]
):
    with OpenStreams(routers) as streams:
        doomed.wait_for_requests(len(routers))
        doomed.process.terminate()
        while httpx.get(f"{doomed.url}/health", timeout=DEADLINE_S).status_code == 200:
            doomed.leave_the_core_to_it()

        for router in routers:
            assert statuses(router, 8) == [200] * 8, router.log
        assert streams.whole() == {router.name: [True, True] for router in routers}
    assert doomed.wait() == 0
    assert "Traceback" not in doomed.log
    for router in routers:
        assert statuses(router, 2) == [200] * 2, router.log
    workers[0].idle_metrics()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_smg_after_its_streams(workers: list[EngineServe], signum: signal.Signals):
    if reason := why_not(SMG):
        pytest.skip(reason)
    with Router(SMG, *(each.url for each in workers)) as router:
        router.wait_until_ready()
        with OpenStreams([router]) as streams:
            router.process.send_signal(signum)
            assert streams.whole() == {SMG: [True, True]}
        # smg's Python still has the KeyboardInterrupt of Ctrl-C to raise once its server has ended, unless SIGINT is
        # ignored where it was started (in the background of a script).
        ends = (0, -signal.SIGINT) if signum is signal.SIGINT else (0,)
        assert router.process.wait(DEADLINE_S) in ends, router.log
