"""`Router`: a real router in front of engines, as a user starts it.

`make routers` gives each an environment of its own: smg and sglang-router both install a command `smg`.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

import httpx

from ..serving import DEADLINE_S, EngineServe, engine_environment

FOLDER: Final = Path(__file__).parents[3] / "build" / "routers"
SMG: Final = "smg"
ALL: Final = (SMG, "sglang-router", "vllm-router")

_COLORS: Final = re.compile(r"\x1b\[[0-9;]*m")
_PORTS: Final = (20_000, 32_000)
_QUICK: Final = (
    *("--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"),
    *("--health-failure-threshold", "1", "--health-success-threshold", "1"),
)
_SMG_ONLY: Final = ("--disable-tokenizer-autoload", "--load-monitor-interval", "2")


def why_not(name: str) -> str:
    """Why the tests of a router are skipped; "" if it is installed."""
    if (FOLDER / name / "bin" / name).exists():
        return ""
    return f"{name} is not installed in {FOLDER / name}: `make routers` installs it, from the package index"


class Router:
    """One router. A context manager that leaves nothing running.

    Attributes:
        name: of `ALL`.
        url: where it listens.
    """

    def __init__(
        self,
        name: str,
        *workers: str,
        policy: str = "cache_aware",
        more: tuple[str, ...] = (),
        roles: tuple[str, ...] = (),
    ) -> None:
        """`roles`: flags that name prefill and decode workers."""
        self.name = name
        self._tmp = Path(tempfile.mkdtemp(prefix="router-"))
        port, metrics_port = free_ports(2)
        self.url = f"http://127.0.0.1:{port}"
        self._log = self._tmp / "log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                self._command(workers, policy, port, metrics_port, more, roles),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=engine_environment(self._tmp),
                cwd=self._tmp,
                start_new_session=True,
            )

    def _command(
        self,
        workers: tuple[str, ...],
        policy: str,
        port: int,
        metrics_port: int,
        more: tuple[str, ...],
        roles: tuple[str, ...],
    ) -> list[str]:
        launch = ("launch", *_SMG_ONLY) if self.name == SMG else ()
        return [
            str(FOLDER / self.name / "bin" / self.name),
            *(("launch",) if self.name == "sglang-router" else launch),
            *("--host", "127.0.0.1", "--port", str(port), "--policy", policy, *_QUICK),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
            *(("--worker-urls", *workers) if workers else ()),
            *roles,
            *more,
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(DEADLINE_S)
        shutil.rmtree(self._tmp, ignore_errors=True)

    @property
    def log(self) -> str:
        """What it has said so far, without colors."""
        return _COLORS.sub("", self._log.read_text(errors="replace"))

    def wait_until_ready(self, num_workers: int = 2) -> Self:
        """Wait until it routes to all workers."""
        self.wait_for(lambda: self.num_healthy() == num_workers)
        return self

    def num_healthy(self) -> int:
        """The workers that it routes to; 0 while it does not answer."""
        try:
            answer = httpx.get(f"{self.url}/workers", timeout=DEADLINE_S)
            workers = answer.json()["workers"]
        except (httpx.TransportError, ValueError, KeyError):
            return 0
        return sum(bool(worker["is_healthy"]) for worker in workers)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline_s, self.log
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.05)

    def client(self) -> httpx.Client:
        """A client of its own, without connections from before."""
        return httpx.Client(base_url=self.url, timeout=DEADLINE_S)


def kill(engine: EngineServe) -> None:
    """SIGKILL for all processes of an engine at once: a machine that is gone."""
    for pid in (engine.process.pid, *engine.pids.values()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    engine.wait()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, below those that the kernel gives to outgoing connections: it gives out many
    of them before the router, which checks its workers first, listens.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = random.SystemRandom().randrange(*_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
    return ports
