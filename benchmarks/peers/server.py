"""`Server`: one side's process, from its command to the first completion, and until all its processes have ended."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.peers.sides import HOST, MODEL_NAME, Side

_FIRST_PROMPT: Final = [788, 216, 34, 32, 34, 36, 28, 1792]
_POLL_S: Final = 0.05
_STOP_S: Final = 20.0


class ServerError(Exception):
    """A server did not start, or did not answer; the message has the end of its log."""


class Server:
    """A running side.

    Attributes:
        first_completion_s: from its command until a request of 8 tokens was answered.
    """

    def __init__(self, side: Side, process: subprocess.Popen[bytes], log: Path) -> None:
        self.side = side
        self.first_completion_s = 0.0
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        """The pid of the started process; the others are its descendants."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether that process runs."""
        return self._process.poll() is None

    def wait_for_completion(self, timeout_s: float) -> float:
        """Wait until it is healthy, and for an answer of 8 tokens; returns the seconds.

        Raises:
            ServerError: it ended, or is not ready in time.
        """
        started_s = time.monotonic()
        while not self._healthy():
            if not self.alive:
                raise ServerError(
                    f"{self.side.name} ended with code {self._process.returncode}:\n{self._tail()}"
                )
            if time.monotonic() - started_s > timeout_s:
                raise ServerError(f"{self.side.name} is not ready after {timeout_s:.0f} s:\n{self._tail()}")
            time.sleep(_POLL_S)
        body = {"model": MODEL_NAME, "prompt": _FIRST_PROMPT, "max_tokens": 8, "temperature": 0}
        try:
            status, answer = self._ask(
                "POST", "/v1/completions", body, timeout_s - (time.monotonic() - started_s)
            )
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.side.name} broke off its first answer: {error!r}") from error
        if status != 200:
            raise ServerError(f"{self.side.name} answered HTTP {status}: {answer[:300]}")
        return time.monotonic() - started_s

    def stop(self) -> None:
        """End all its processes, with SIGTERM first."""
        for number, wait_s in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, _STOP_S)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)
                break
        with contextlib.suppress(ProcessLookupError):  # children that outlive their parent
            os.killpg(self.pid, signal.SIGKILL)

    def _healthy(self) -> bool:
        try:
            return self._ask("GET", "/health", None, 5.0)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def _ask(self, method: str, path: str, body: object, timeout_s: float) -> tuple[int, str]:
        connection = http.client.HTTPConnection(HOST, self.side.port, timeout=max(timeout_s, 1.0))
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        finally:
            connection.close()

    def _tail(self, num_lines: int = 15) -> str:
        try:
            lines = self._log.read_text(errors="replace").splitlines()
        except OSError:
            return "(no log)"
        return "\n".join(lines[-num_lines:])


def start(side: Side, log: Path, timeout_s: float) -> Server:
    """Start a side and wait for its first completion.

    Raises:
        ServerError: its port is taken, its command cannot be run, or it is not ready in time; its
            processes are ended then.
    """
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, side.port))
        except OSError as error:
            raise ServerError(f"port {side.port} of {side.name} is taken; choose another --port") from error
    started_s = time.monotonic()
    with open(log, "ab") as output:  # after the output of earlier starts
        try:
            process = subprocess.Popen(
                side.command,
                env={**os.environ, **side.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ServerError(f"{side.name} cannot be started: {error}") from error
    server = Server(side, process, log)
    try:
        server.wait_for_completion(timeout_s)
        server.first_completion_s = time.monotonic() - started_s
    except BaseException:
        server.stop()
        raise
    return server


@contextmanager
def running(side: Side, log: Path, timeout_s: float) -> Iterator[Server]:
    """A server for the time of the block; see `start`."""
    server = start(side, log, timeout_s)
    try:
        yield server
    finally:
        server.stop()
