"""`engine fleet` with real servers on a real Ray: healed, scaled, drained, and behind a router."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from .fleets import DEADLINE_S, EngineFleet, num_started
from .routers.routing import SMG, Router, why_not

pytestmark = [
    pytest.mark.real_process,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("real_ray"),
]

TINY = ("--dtype", "float32", "--served-model-name", "tiny", "--chaos", "slow=0.02")
LONG = {"model": "tiny", "prompt": "on and on", "max_tokens": 200, "min_tokens": 200, "stream": True}
SHORT = {"model": "tiny", "prompt": "a lazy dog", "max_tokens": 4, "temperature": 0}


def whole_stream(url: str, begun: threading.Event) -> list[str]:
    """The lines of a long stream, which must come to its end."""
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=DEADLINE_S) as response:
        lines = []
        for line in response.iter_lines():
            begun.set()
            if line:
                lines.append(line)
    return lines


class Stream:
    """A long stream in a thread of its own; its first event has come."""

    def __init__(self, url: str) -> None:
        self._lines: list[str] = []
        begun = threading.Event()
        self._thread = threading.Thread(target=lambda: self._lines.extend(whole_stream(url, begun)))
        self._thread.start()
        assert begun.wait(DEADLINE_S)

    def is_whole(self) -> bool:
        """Wait for its end; whether that is the right one."""
        self._thread.join(DEADLINE_S)
        return self._lines[-1:] == ["data: [DONE]"] and '"error"' not in self._lines[-2]


def test_servers_are_healed_scaled_and_drained(model: Path):
    with EngineFleet(str(model), "--replicas", "2", serve=TINY) as fleet:
        fleet.wait_until_ready(2)
        assert httpx.get(f"{fleet.url}/health", timeout=DEADLINE_S).status_code == 200
        first, second = fleet.ready()
        assert [worker["model_id"] for worker in json.loads(fleet.list_path.read_text())["workers"]] == [
            "tiny"
        ] * 2

        # Killed: out of the list, and there again with another process.
        os.kill(first["pid"], signal.SIGKILL)
        fleet.wait_for(lambda: first["url"] not in fleet.listed())
        assert second["url"] in fleet.listed()
        fleet.wait_until_ready(2)
        again = fleet.ready()[0]
        assert again["pid"] != first["pid"]
        assert again["failures"] == 1
        assert again["last_failure"].startswith("was killed by SIGKILL")

        # Bad requests change nothing.
        for replicas in (0, 100_000, "2", None, 1.5):
            assert fleet.scale(replicas).status_code == 400
        assert httpx.post(f"{fleet.url}/scale", content=b"{", timeout=DEADLINE_S).status_code == 400
        assert httpx.get(f"{fleet.url}/scale", timeout=DEADLINE_S).status_code == 405
        assert fleet.replicas()["target"] == 2

        # The one that leaves ends its stream first; on two cores Ray has a place for another one only then.
        stream = Stream(second["url"])
        assert fleet.scale(1).json()["target"] == 1
        fleet.wait_for(lambda: second["url"] not in fleet.listed())
        assert stream.is_whole()
        fleet.wait_until_ready(1)
        fleet.scale(2)
        third = fleet.wait_until_ready(2).ready()[1]
        assert num_started(fleet) == 4

        stream = Stream(again["url"])
        assert fleet.stop() == 0, fleet.log
        assert stream.is_whole()
        assert fleet.listed() == []
        fleet.wait_until_nothing_is_left(again["url"], second["url"], third["url"])
        assert "Traceback" not in fleet.log


def test_nothing_outlives_a_killed_fleet(model: Path):
    with EngineFleet(str(model), "--replicas", "1", serve=TINY) as fleet:
        [only] = fleet.wait_until_ready(1).ready()
        fleet.process.kill()
        fleet.wait()
        deadline_url = only["url"]
        while fleet.pids_of_session():
            threading.Event().wait(0.1)
        with pytest.raises(httpx.ConnectError):
            httpx.get(deadline_url, timeout=DEADLINE_S)


def test_a_mistake_in_the_settings_ends_the_fleet(model: Path):
    with EngineFleet(str(model), serve=("--max-model-len", "99999999")) as fleet:
        assert fleet.wait() == 2, fleet.log
        fleet.wait_until_nothing_is_left()
        assert re.search(
            r"^engine: replica [01] exited with code 2; its last lines above", fleet.log, re.MULTILINE
        )


def test_a_signal_while_ray_starts_ends_the_fleet(model: Path):
    with EngineFleet(str(model), serve=TINY) as fleet:
        fleet.wait_for(lambda: any("gcs_server" in command for command in fleet.commands().values()))
        assert fleet.stop() == 128 + signal.SIGTERM, fleet.log
        fleet.wait_until_nothing_is_left()
        assert "engine: stopped at once by SIGTERM" in fleet.log


def test_the_end_of_ray_is_the_end_of_the_fleet_with_a_line(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "2")  # 60 s
    with EngineFleet(str(model), "--replicas", "1", serve=TINY) as fleet:
        fleet.wait_until_ready(1)
        [head] = [pid for pid, command in fleet.commands().items() if "gcs_server" in command.split()[0]]
        os.kill(head, signal.SIGKILL)
        assert fleet.wait() == 1, fleet.log
        assert re.search(r"^engine: the connection to Ray has ended, and", fleet.log, re.MULTILINE)
        assert fleet.listed() == []
        while fleet.pids_of_session():
            threading.Event().wait(0.1)


@pytest.fixture
def fleet(model: Path) -> Iterator[EngineFleet]:
    with EngineFleet(str(model), "--replicas", "2", serve=TINY) as fleet:
        yield fleet.wait_until_ready(2)


@pytest.fixture
def router(fleet: EngineFleet) -> Iterator[Router]:
    """smg, which reads the fleet's list of workers."""
    if reason := why_not(SMG):
        pytest.skip(reason)
    discovery = ("--discovery-provider", "file", "--discovery-file", str(fleet.list_path))
    with Router(SMG, more=(*discovery, "--discovery-check-interval-secs", "1")) as router:
        yield router.wait_until_ready()


def test_clients_of_a_router_notice_nothing(fleet: EngineFleet, router: Router):
    statuses: list[int] = []
    is_over = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=router.url, timeout=DEADLINE_S) as client:
            while not is_over.is_set():
                statuses.append(client.post("/v1/completions", json=SHORT).status_code)

    fleet.wait_for(lambda: router.num_healthy() == 2)
    client = threading.Thread(target=ask)
    client.start()
    try:
        os.kill(fleet.ready()[0]["pid"], signal.SIGKILL)
        fleet.wait_for(lambda: len(fleet.listed()) == 1)
        fleet.wait_until_ready(2)
        fleet.wait_for(lambda: router.num_healthy() == 2)  # it reads the list once a second
        fleet.scale(1)
        fleet.wait_until_ready(1)
        fleet.wait_for(lambda: router.num_healthy() == 1)
        fleet.scale(2)
        fleet.wait_until_ready(2)
        fleet.wait_for(lambda: router.num_healthy() == 2)
    finally:
        is_over.set()
        client.join(DEADLINE_S)
    assert statuses
    assert set(statuses) == {200}

    stream = Stream(router.url)
    assert fleet.stop() == 0, fleet.log
    assert stream.is_whole()
    fleet.wait_until_nothing_is_left()
