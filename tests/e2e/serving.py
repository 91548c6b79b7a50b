"""`EngineServe`: `engine serve` as a user starts it, seen from outside: its output, its processes, its end.

Nothing here sleeps: it waits for output, for a process to end, or for an HTTP answer, always with a deadline.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, Self

import httpx

DEADLINE_S: Final = 60.0  # for what takes a second or two on an idle machine
SLOW: Final = ("--chaos", "slow=0.02")
"""For tests that must do something before an answer ends: 2,000 tokens take at least 40 s, on any machine."""

_READY: Final = re.compile(r"^Ready after [\d.]+ s: (\S+) at (https?://\S+)$", re.MULTILINE)
_LAST_READY_LINE: Final = "Stop with Ctrl-C."
_CHILD: Final = re.compile(r"started child=(\w+) pid=(\d+)")
_SAMPLE: Final = re.compile(
    r"""^(engine:\w+)(?:\{(?:model_name="(?:[^"\\]|\\.)*",?)?(.*)\})? (\S+)$""", re.MULTILINE
)


def engine_command(*arguments: str) -> list[str]:
    """The command line of `engine ...` under the interpreter that runs the tests."""
    return [sys.executable, "-m", "engine.cli.main", *arguments]


def engine_environment(tmp: Path) -> dict[str, str]:
    """An environment without the caller's engine settings, with a directory for temporary files of its own."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ENGINE_")}
    return inherited | {"TMPDIR": str(tmp), "OMP_NUM_THREADS": "1"}


def run_engine(tmp: Path, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        engine_command(*arguments),
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        env=engine_environment(tmp),
        timeout=DEADLINE_S,
        check=False,
    )


class EngineServe:
    """One `engine serve`. A context manager that leaves nothing running.

    Attributes:
        process: the command, which is the supervisor.
        tmp: its directory for temporary files, thus the place of its sockets.
        crash_dir: where it puts crash reports.
        url, model: once it is ready.
    """

    def __init__(self, *arguments: str) -> None:
        # Not pytest's: the path of a Unix socket must be short.
        self.tmp = Path(tempfile.mkdtemp(prefix="e2e-"))
        self.url = ""
        self.model = ""
        self._log = self.tmp / "log"
        self.crash_dir = self.tmp / "crashes"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                engine_command(
                    *("serve", "--port", "0", "--num-threads", "1", "--crash-dir", str(self.crash_dir)),
                    *arguments,
                ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=engine_environment(self.tmp),
                start_new_session=True,  # so that a test that fails can kill all of it
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        for pid in (self.process.pid, *self.pids.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(DEADLINE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        shutil.rmtree(self.tmp, ignore_errors=True)

    # ------------------------------------------------------------ what it says

    def wait_until_ready(self, within_s: float = DEADLINE_S) -> Self:
        """Read standard output up to the block that says where it is."""
        output = self._read_until(_LAST_READY_LINE, within_s)
        match = _READY.search(output)
        assert match, output
        self.model, self.url = match[1], match[2]
        return self

    def _read_until(self, text: str, within_s: float) -> str:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        deadline_s = time.monotonic() + within_s
        output = b""
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while text.encode() not in output:
                assert selector.select(deadline_s - time.monotonic()), f"not ready in time:\n{self.log}"
                part = os.read(fd, 65536)
                assert part, f"ended before it was ready:\n{self.log}"
                output += part
        return output.decode()

    def wait_for_log(self, text: str) -> None:
        """Wait until `text` stands on standard error."""
        deadline_s = time.monotonic() + DEADLINE_S
        while text not in self.log:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline_s, self.log
            self.leave_the_core_to_it()

    def leave_the_core_to_it(self) -> None:
        """Between two looks: return when it has ended, or soon."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.02)

    @property
    def log(self) -> str:
        """Standard error so far."""
        return self._log.read_text(errors="replace")

    @property
    def causes(self) -> list[str]:
        """The lines in which the command says why it ended."""
        return [line for line in self.log.splitlines() if line.startswith("engine: ")]

    # ------------------------------------------------------------ its processes and its end

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children, by role."""
        return {role: int(pid) for role, pid in _CHILD.findall(self.log)}

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

    def leftovers(self) -> list[str]:
        """What an engine that has ended has left behind: processes, socket directories, its port."""
        left = [f"process {role} {pid}" for role, pid in self.pids.items() if _is_alive(pid)]
        left += [
            f"file {path.name}" for path in self.tmp.iterdir() if path not in (self._log, self.crash_dir)
        ]
        if self.url:
            host, port = self.url.partition("://")[2].split(":")
            with socket.socket() as probe:
                if probe.connect_ex((host, int(port))) == 0:
                    left.append(f"port {port}")
        return left

    @contextlib.contextmanager
    def stopped(self, role: str = "scheduler") -> Iterator[None]:
        """A process does nothing within this block: all of it comes before anything that the process would do."""
        os.kill(self.pids[role], signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pids[role], signal.SIGCONT)

    # ------------------------------------------------------------ its numbers

    def wait_for_requests(self, num: int) -> None:
        """Wait until so many are in the engine, also in a scheduler that is stopped."""
        deadline_s = time.monotonic() + DEADLINE_S
        with httpx.Client(base_url=self.url, timeout=DEADLINE_S) as client:
            while client.get("/server_info").json()["num_live_requests"] != num:
                assert time.monotonic() < deadline_s, f"there are never {num} requests"
                self.leave_the_core_to_it()

    def metrics_when(self, condition: Callable[[Metrics], bool]) -> Metrics:
        """Ask until `condition` holds for numbers that the scheduler reported after this call began."""
        began_s = time.monotonic()  # the clock of the reports, too
        with httpx.Client(base_url=self.url, timeout=DEADLINE_S) as client:
            while True:
                report = client.get("/server_info").json()["scheduler"]
                metrics = Metrics(client.get("/metrics").text)
                if report is not None and report["sent_s"] > began_s and condition(metrics):
                    return metrics
                assert time.monotonic() < began_s + DEADLINE_S, f"it never came to this:\n{metrics.page}"
                self.leave_the_core_to_it()

    def idle_metrics(self) -> Metrics:
        """The metrics of an engine in which nothing runs, waits or is held."""
        idle = {"num_running_reqs": 0, "num_queue_reqs": 0, "kv_used_tokens": 0}
        return self.metrics_when(lambda metrics: metrics.items() >= idle.items())


class Metrics(Mapping[str, float]):
    """A page of `/metrics`; keys are names without `engine:`, with their labels but `model_name` as they stand."""

    def __init__(self, page: str) -> None:
        self.page = page
        self._values = {
            name.removeprefix("engine:") + (f"{{{labels}}}" if labels else ""): float(value)
            for name, labels, value in _SAMPLE.findall(page)
        }

    def __getitem__(self, name: str) -> float:
        return self._values[name]

    def __iter__(self):
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _is_alive(pid: int) -> bool:
    """Whether a process is there and no zombie, which is the parent's matter."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
