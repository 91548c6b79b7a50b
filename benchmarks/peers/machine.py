"""The CPU use during a measurement: CPU time of process trees from /proc, and that of all other processes."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class MachineTime(NamedTuple):
    """Seconds of all cores together since the machine started."""

    busy_s: float
    stolen_s: float  # by the host, from a virtual machine


class Share(msgspec.Struct, frozen=True):
    """CPU cores used during a measurement.

    Attributes:
        server: of the server's process tree.
        client: of the client and this process.
        others: of all other processes, including idle servers.
        stolen: taken by the host of a virtual machine.
    """

    server: float
    client: float
    others: float
    stolen: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """CPU times at one moment; two of them give a `Share`."""

    at_s: float
    machine: MachineTime
    server_s: float
    own_s: float

    @classmethod
    def take(cls, server_pid: int | None) -> Snapshot:
        """Read the CPU times. The client is a child of this process, and is waited for before the second reading."""
        own = sum(
            usage.ru_utime + usage.ru_stime
            for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        )
        server_s = sum(cpu_seconds(pid) for pid in tree(server_pid)) if server_pid is not None else 0.0
        return cls(time.monotonic(), machine_time((PROC / "stat").read_text()), server_s, own)

    def until(self, later: Snapshot) -> Share:
        """The CPU use between two readings."""
        wall_s = max(later.at_s - self.at_s, 1e-9)
        server_s, own_s = later.server_s - self.server_s, later.own_s - self.own_s
        busy_s = later.machine.busy_s - self.machine.busy_s
        return Share(
            server=server_s / wall_s,
            client=own_s / wall_s,
            others=max(0.0, busy_s - server_s - own_s) / wall_s,
            stolen=(later.machine.stolen_s - self.machine.stolen_s) / wall_s,
        )


def machine_time(stat: str) -> MachineTime:
    """Parse /proc/stat. The time of guests is included in user time; idle and iowait are not busy."""
    user, nice, system, _, _, irq, softirq, steal = (int(field) for field in stat.split(None, 9)[1:9])
    return MachineTime((user + nice + system + irq + softirq) / _TICKS_PER_S, steal / _TICKS_PER_S)


def tree(root_pid: int) -> list[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found, left = [], [root_pid]
    while left:
        pid = left.pop()
        found.append(pid)
        left.extend(children.get(pid, ()))
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of one process so far; 0 if it has ended."""
    fields = _stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S if fields else 0.0


class Memory(msgspec.Struct, frozen=True):
    """Memory of a process tree.

    Attributes:
        resident_bytes: the processes' resident sizes added up, as `top` shows them: shared pages count in each.
        proportional_bytes: with shared pages divided among their users, so that the sum is exact.
    """

    resident_bytes: int
    proportional_bytes: int

    @classmethod
    def of_tree(cls, root_pid: int) -> Memory:
        """Now."""
        sizes = [_rollup(pid) for pid in tree(root_pid)]
        return cls(sum(size["Rss"] for size in sizes), sum(size["Pss"] for size in sizes))


def process_name(pid: int) -> str:
    """The command line of a process, shortened."""
    try:
        command = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "gone"
    return command.strip()[:60]


def _rollup(pid: int) -> dict[str, int]:
    sizes = {"Rss": 0, "Pss": 0}
    try:
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return sizes  # it has just ended
    for line in lines:
        name, _, rest = line.partition(":")
        if name in sizes:
            sizes[name] = int(rest.split()[0]) * 1024
    return sizes


def _parents() -> Iterator[tuple[int, int]]:
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat_fields(int(entry.name))):
            yield int(entry.name), int(fields[1])


def _stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; the name before it may contain spaces. Empty if it has ended."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
