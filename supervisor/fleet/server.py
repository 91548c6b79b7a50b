"""`Server`: one `engine serve` of a fleet, in a Ray actor (`ServerActor`). Ray is passed in, not imported.

The module is also the program that an actor starts: it asks the kernel for SIGTERM at the end of the actor and becomes
the server, which then drains. No token passes through Ray: clients and routers speak to the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import httpx

from ...launch.child.socket_dir import running_servers
from ..ray.cluster import RayCluster, why_it_died

_MAIN: Final = f"{__package__.split('.')[0]}.cli.main"
_PR_SET_PDEATHSIG: Final = 1
_ASK_S: Final = 1.0
_TIMEOUT_S: Final = 5.0
_KILL_S: Final = 5.0
_MEMORY_HINT: Final = " (by another process, or by the kernel because memory ran out)"


class Status(NamedTuple):
    """A server, as its actor reports it.

    Attributes:
        where: address of its machine.
        url, model: where it listens, and its model's name in requests; None until it listens.
        is_well: its `/health` is 200.
        exit_code: None while it runs; 2 means that the user can correct it; negative for a signal.
    """

    pid: int
    where: str
    url: str | None = None
    model: str | None = None
    is_well: bool = False
    exit_code: int | None = None


class ServerOptions(NamedTuple):
    """Options that the servers of a fleet share.

    Attributes:
        needs: what a server takes of its machine, in Ray's units.
        env: variables to set.
        key: an API key of the servers.
        home: address of the fleet's machine, in Ray's notation.
        takes_host: a server on another machine listens at that machine's address.
    """

    needs: dict[str, float]
    env: dict[str, str]
    key: str | None
    home: str
    takes_host: bool


class ServerActor:
    """Owns one server on its machine; each method returns within seconds.

    Ray runs the methods in the main thread of the actor's process, so the thread that starts the server lives as long
    as the actor.
    """

    def __init__(self, arguments: list[str], options: ServerOptions) -> None:
        """Start the server with the arguments of `engine`."""
        self._where = where = RayCluster(importlib.import_module("ray"), is_own=False).address
        self._is_away = where != options.home
        host = ["--host", where] if self._is_away and options.takes_host else []
        self._process = start_tied([sys.executable, "-P", "-m", _MAIN, *arguments, *host], options.env)
        headers = {"Authorization": f"Bearer {options.key}"} if options.key else {}
        # A server of the fleet is asked directly: a proxy is for what lies outside.
        self._client = httpx.Client(headers=headers, timeout=_TIMEOUT_S, trust_env=False)
        self._status = Status(self._process.pid, self._where)
        self._asked_s = -_ASK_S

    def status(self) -> Status:
        """The state of the server; it is asked itself at most once a second."""
        code = self._process.poll()
        if code is not None:
            self.kill()  # what it has started
        elif time.monotonic() - self._asked_s >= _ASK_S:
            self._ask()
            self._asked_s = time.monotonic()
        self._status = self._status._replace(exit_code=code)
        return self._status

    def drain(self) -> None:
        """Have the server end its streams, and end."""
        self._process.terminate()

    def kill(self) -> None:
        """End the server and its processes at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _ask(self) -> None:
        for record in running_servers():
            if record.pid == self._process.pid and record.url:
                url = record.url.replace("//127.0.0.1:", f"//{self._where}:") if self._is_away else record.url
                self._status = self._status._replace(url=url, model=record.model)
        if self._status.url is None:
            return
        try:
            is_well = self._client.get(f"{self._status.url}/health").status_code == httpx.codes.OK
        except httpx.HTTPError:
            is_well = False
        self._status = self._status._replace(is_well=is_well)


class Server:
    """One server, as the fleet sees it; only `kill` waits for Ray.

    Attributes:
        status: the last report; None before the first one, as long as Ray has no place for the actor.
        end: exit code and cause (`was killed by SIGKILL`) once it has ended; the code is None if the actor was lost.
    """

    def __init__(self, ray: Any, arguments: list[str], options: ServerOptions) -> None:
        needs = options.needs
        maker = ray.remote(ServerActor).options(num_cpus=needs["CPU"], num_gpus=needs.get("GPU", 0))
        self.status: Status | None = None
        self.end: tuple[int | None, str] | None = None
        self._ray = ray
        self._waits = f"waits for a place on Ray with {' and '.join(f'{k} {v:g}' for k, v in needs.items())}"
        self._actor = maker.remote(arguments, options)
        self._answer = self._actor.status.remote()

    @property
    def where(self) -> str:
        """Its machine, or what it waits for."""
        return self._waits if self.status is None else self.status.where

    def poll(self) -> None:
        """Take the actor's report, if it has come, and ask for the next one."""
        ray = self._ray
        if self.end is not None or not ray.wait([self._answer], timeout=0)[0]:
            return
        try:
            self.status = status = Status(*ray.get(self._answer))
        except ray.exceptions.RayError as error:
            self.end = None, f"was lost with its actor on {self.where}: {why_it_died(error)}"
            return
        if status.exit_code is None:
            self._answer = self._actor.status.remote()
        else:
            self.end = status.exit_code, describe_end(status.exit_code)

    def drain(self) -> None:
        """Have it end its streams, and end."""
        if self.status is None:
            self.end = 0, "was not started"
        else:
            self._actor.drain.remote()

    def kill(self) -> None:
        """End it at once, and give its place back."""
        lost = contextlib.suppress(self._ray.exceptions.RayError)
        if self.end is None and self.status is not None:
            with lost:  # also if the actor does not answer in time
                self._ray.get(self._actor.kill.remote(), timeout=_KILL_S)
        with lost:
            self._ray.kill(self._actor)
        self.end = self.end or (-signal.SIGKILL, "was killed")


def start_tied(command: list[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a command that gets SIGTERM when the calling thread ends, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, str(os.getpid()), *command],
        env={**os.environ, **env, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        process_group=0,
    )


def describe_end(code: int) -> str:
    """End of a process: `was killed by SIGKILL`."""
    if code >= 0:
        return f"exited with code {code}; its last lines above say why" if code else "ended"
    return f"was killed by {signal.Signals(-code).name}{_MEMORY_HINT if -code == signal.SIGKILL else ''}"


def main() -> None:
    """Become the command: `PARENT_PID PROGRAM ARGUMENT...`. The request to the kernel outlives `exec` (Linux)."""
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent):  # it ended before the call above
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
