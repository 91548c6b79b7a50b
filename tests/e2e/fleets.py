"""`EngineFleet`: `engine fleet` as a user starts it, seen from outside: its endpoint, its processes, its end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

import httpx

from .routers.routing import free_ports
from .serving import engine_command, engine_environment

DEADLINE_S: Final = 150.0  # for what takes some seconds on an idle machine
_STARTED: Final = re.compile(r"starting replica=\d+")


class EngineFleet:
    """One `engine fleet`. A context manager that leaves nothing running.

    Attributes:
        process: the command.
        tmp: its directory for temporary files.
        url: of its control endpoint.
        list_path: its list of workers.
    """

    def __init__(self, *arguments: str, serve: tuple[str, ...]) -> None:
        self.tmp = Path(tempfile.mkdtemp(prefix="e2e-"))
        [port] = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self.list_path = self.tmp / "workers.json"
        self._log = self.tmp / "log"
        command = engine_command(
            "fleet", "--port", str(port), "--worker-list", str(self.list_path), *arguments
        )
        server = ("--num-threads", "1", "--crash-dir", str(self.tmp / "crashes"))
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--", *server, *serve],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=engine_environment(self.tmp),
                cwd=self.tmp,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(DEADLINE_S)
        for pid in self.pids_of_session():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.tmp, ignore_errors=True)

    @property
    def log(self) -> str:
        """Standard output and error so far."""
        return self._log.read_text(errors="replace")

    def replicas(self) -> dict[str, Any]:
        """`GET /replicas`; empty while the endpoint does not answer."""
        try:
            body = httpx.get(f"{self.url}/replicas", timeout=DEADLINE_S).json()
        except httpx.TransportError:
            return {}
        assert isinstance(body, dict)
        return body

    def ready(self) -> list[dict[str, Any]]:
        """The replicas that serve."""
        return [each for each in self.replicas().get("replicas", ()) if each["state"] == "ready"]

    def listed(self) -> list[str]:
        """The addresses in the list of workers."""
        try:
            return [each["url"] for each in json.loads(self.list_path.read_text())["workers"]]
        except FileNotFoundError:
            return []

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline_s, self.log
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)

    def wait_until_ready(self, count: int) -> Self:
        """Wait until so many serve and none is on its way, and the list says the same."""
        self.wait_for(
            lambda: (
                len(self.ready()) == len(self.replicas().get("replicas", ())) == len(self.listed()) == count
            )
        )
        return self

    def scale(self, replicas: object) -> httpx.Response:
        """`POST /scale`."""
        return httpx.post(f"{self.url}/scale", json={"replicas": replicas}, timeout=DEADLINE_S)

    def wait(self) -> int:
        """Wait for its end; the exit code."""
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end:\n{self.log}") from None

    def stop(self) -> int:
        """SIGTERM, and wait for the end."""
        self.process.terminate()
        return self.wait()

    def pids_of_session(self) -> list[int]:
        """Processes that descend from the fleet."""
        return list(self.commands())

    def commands(self) -> dict[int, str]:
        """Processes that descend from the fleet, by their command: they share its session, or have its directory."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                environment = (entry / "environ").read_bytes()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            belongs = int(session) == self.process.pid or f"TMPDIR={self.tmp}".encode() in environment
            if belongs and state != "Z":
                found[int(entry.name)] = command
        return found

    def wait_until_nothing_is_left(self, *urls: str) -> None:
        """No process, no port, no directory."""
        deadline_s = time.monotonic() + DEADLINE_S
        while (left := self.pids_of_session()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert left == [], self.log
        for url in (self.url, *urls):
            host, port = url.partition("://")[2].split(":")
            with socket.socket() as probe:
                assert probe.connect_ex((host, int(port))) != 0, url
        expected = {"log", "workers.json", "crashes"}
        assert {path.name for path in self.tmp.iterdir()} <= expected


def num_started(fleet: EngineFleet) -> int:
    """Processes of servers that it has started."""
    return len(_STARTED.findall(fleet.log))
