"""`Census`: what an engine holds at one moment, seen from outside: memory, files and threads, pages and requests.

Memory is what belongs to a process alone (anonymous and shared-memory pages): pages of mapped files come and go with
the kernel's cache, which others on the machine fill and empty.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TextIO

import httpx

from tests.e2e.serving import DEADLINE_S, EngineServe

NOTHING_LIVES: Final[Mapping[str, float]] = {
    "num_running_reqs": 0,
    "num_queue_reqs": 0,
    "num_swapped_reqs": 0,
    "num_grammar_reqs": 0,
    "kv_used_tokens": 0,
    "host_used_tokens": 0,
    "pinned_tokens": 0,
    "detokenizer_reqs": 0,
}
"""Each time the scheduler becomes idle it proves its page equation, and that no page is locked: or it is restarted."""
_MEMORY: Final = re.compile(r"^(RssAnon|RssShmem|Threads):\s+(\d+)", re.MULTILINE)


class Held(NamedTuple):
    """What a process holds."""

    memory_kib: int
    fds: int
    threads: int
    shm: int  # files of /dev/shm, mapped or open


class Census(NamedTuple):
    """What an engine holds."""

    processes: Mapping[str, Held]
    socket_files: int
    requests: int  # in the request log


def held_by(pid: int) -> Held:
    """What a process holds now."""
    proc = Path("/proc") / str(pid)
    figures = {name: int(value) for name, value in _MEMORY.findall((proc / "status").read_text())}
    open_files = [_target(fd) for fd in (proc / "fd").iterdir()]
    mapped = {line.split()[-1] for line in (proc / "maps").read_text().splitlines() if "/dev/shm/" in line}
    shm = mapped | {name for name in open_files if name.startswith("/dev/shm/")}
    memory_kib = figures["RssAnon"] + figures.get("RssShmem", 0)
    return Held(memory_kib, len(open_files), figures["Threads"], len(shm))


def take_census(engine: EngineServe) -> Census:
    """Of all processes of an engine."""
    pids = {"supervisor": engine.process.pid} | engine.pids
    return Census(
        {role: held_by(pid) for role, pid in pids.items()},
        sum(path.is_socket() for path in engine.tmp.rglob("*")),
        httpx.get(f"{engine.url}/server_info", timeout=DEADLINE_S).json()["num_live_requests"],
    )


def idle_census(engine: EngineServe) -> tuple[Census, list[str]]:
    """The same once no request is left, with the prefix cache emptied; and what is wrong then."""
    problems = []
    try:
        metrics = engine.metrics_when(lambda metrics: metrics.items() >= NOTHING_LIVES.items())
    except AssertionError:
        metrics = engine.metrics_when(lambda metrics: True)
        left = {name: metrics[name] for name, value in NOTHING_LIVES.items() if metrics[name] != value}
        problems.append(f"nobody asks for anything, but there are {left}")
    answer = httpx.post(f"{engine.url}/flush_cache", timeout=DEADLINE_S).json()
    if answer["kept_tokens"]:
        problems.append(f"{answer['kept_tokens']} tokens of the radix tree are locked and nobody uses them")
    if answer["flushed_tokens"] > metrics["kv_total_tokens"]:
        problems.append(f"the radix tree had {answer['flushed_tokens']} tokens, more than there are")
    census = take_census(engine)
    if census.requests:
        problems.append(f"{census.requests} requests are left in the request log")
    return census, problems


def settled_census(engine: EngineServe, before: Census | None = None) -> tuple[Census, list[str]]:
    """The same once it also has nothing, but memory, that it did not hold `before`; and what it has for ever.

    Connections of clients that have just left go a moment later.
    """
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        census, problems = idle_census(engine)
        if before is not None:
            problems += differences(before, census, dict.fromkeys(census.processes, sys.maxsize))
        if not problems or time.monotonic() > deadline_s:
            return census, problems


def differences(before: Census, after: Census, allowed_kib: Mapping[str, int]) -> list[str]:
    """What an idle engine holds that it did not hold before; memory may grow by so much."""
    problems = []
    for role, held in after.processes.items():
        old = before.processes[role]
        if (grown_kib := held.memory_kib - old.memory_kib) > allowed_kib[role]:
            problems.append(
                f"{role}: memory grew by {grown_kib} KiB to {held.memory_kib} KiB, allowed are {allowed_kib[role]}"
            )
        for name, was, now in zip(Held._fields[1:], old[1:], held[1:], strict=True):
            if now > was:
                problems.append(f"{role}: {name} were {was} and are {now}")
    if after.socket_files != before.socket_files:
        problems.append(f"socket files were {before.socket_files} and are {after.socket_files}")
    return problems


class Watch:
    """Looks at all processes of an engine every so often, and writes it down. A context manager.

    Attributes:
        samples: (seconds since the start, what each held).
    """

    def __init__(self, engine: EngineServe, interval_s: float, out: TextIO | None = None) -> None:
        self.samples: list[tuple[float, Mapping[str, Held]]] = []
        self._engine = engine
        self._interval_s = interval_s
        self._out = out
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def slopes_kib(self, from_s: float) -> dict[str, float]:
        """KiB per minute by which the memory of each process grew from then on: the line of least squares."""
        late = [(at_s / 60, held) for at_s, held in self.samples if at_s >= from_s]
        roles = late[0][1] if late else {}
        return {
            role: _slope([(at, float(held[role].memory_kib)) for at, held in late if role in held])
            for role in roles
        }

    def _run(self) -> None:
        began_s = time.monotonic()
        pids = {"supervisor": self._engine.process.pid} | self._engine.pids
        while True:
            at_s = time.monotonic() - began_s
            held = {role: held_by(pid) for role, pid in pids.items()}
            self.samples.append((at_s, held))
            if self._out is not None:
                line = {"at_s": round(at_s, 1)} | {role: each._asdict() for role, each in held.items()}
                self._out.write(json.dumps(line) + "\n")
                self._out.flush()
            if self._stop.wait(self._interval_s):
                return


def _slope(points: Sequence[tuple[float, float]]) -> float:
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def _target(fd: Path) -> str:
    try:
        return str(fd.readlink())
    except OSError:  # closed meanwhile
        return ""


def reports_nothing_lost(log: str) -> list[str]:
    """What a log says of processes that failed though nobody disturbed them."""
    words = ("Traceback", "restarting processes=", "level=error")
    return [f"the log has {word!r}" for word in words if word in log]
